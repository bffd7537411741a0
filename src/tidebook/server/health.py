"""Health checks: whether the process responds, and whether its book does."""

from __future__ import annotations

import time

import tidebook
from tidebook.api.health import CheckResponse, LiveResponse, ReadyResponse
from tidebook.server.call import Call, Handler
from tidebook.server.responses import Reply


async def live(call: Call) -> LiveResponse:
    """Answer as long as the event loop runs."""
    uptime_s = round(time.monotonic() - call.state.started_s, 3)
    return LiveResponse(True, tidebook.__version__, uptime_s, call.book.clock.now_ms())


async def ready(call: Call) -> Reply:
    """Check the log and the store; not ready if one does not answer or the server drains."""
    draining = call.state.draining.is_set()
    server = CheckResponse("server", not draining, "the server is shutting down" if draining else None)
    checks = [server, *await call.state.book_checks.run()]
    ok = all(each.ok for each in checks)
    return Reply(ReadyResponse(ok, draining, checks), 200 if ok else 503)


HANDLERS: dict[str, Handler] = {"health.live": live, "health.ready": ready}
