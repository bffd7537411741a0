"""Health checks: whether the process responds, and whether its book does."""

from __future__ import annotations

import asyncio
import time

import tidebook
from tidebook.api.health import CheckAnswer, LiveAnswer, ReadyAnswer
from tidebook.core.errors import TidebookError
from tidebook.server.answers import Reply
from tidebook.server.call import Call, Handler

CHECK_S = 5.0


async def live(call: Call) -> LiveAnswer:
    """Answer as long as the event loop runs."""
    uptime_s = round(time.monotonic() - call.state.started_s, 3)
    return LiveAnswer(True, tidebook.__version__, uptime_s, call.book.clock.now_ms())


async def ready(call: Call) -> Reply:
    """Ask the log and the store for their topics; not ready if one does not answer or the server drains."""
    draining = call.state.draining.is_set()
    checks = [CheckAnswer("server", not draining, "the server is shutting down" if draining else None)]
    for name, check in (("log", call.book.log.topics), ("store", call.book.store.topics)):
        reason = None
        try:
            async with asyncio.timeout(CHECK_S):
                await check()
        except TimeoutError:
            reason = f"it does not answer within {CHECK_S:g} s"
        except TidebookError as error:
            reason = str(error)
        checks.append(CheckAnswer(name, reason is None, reason))
    ok = all(each.ok for each in checks)
    return Reply(ReadyAnswer(ok, draining, checks), 200 if ok else 503)


HANDLERS: dict[str, Handler] = {"health.live": live, "health.ready": ready}
