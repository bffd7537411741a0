"""Live views: rows of HTML as server-sent events, for the pages that follow a journal or a tag."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from tidebook.api.route import Route
from tidebook.server.browser_sessions import BrowserSession
from tidebook.server.responses import Chunk, Lines
from tidebook.server.state import ServerState
from tidebook.server.streams import StreamSender

#: Turns a row of a live view into one line of HTML.
RenderRow = Callable[[Any], bytes]


class LiveView(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that a page follows: `follow` yields them rendered, each with the id from which a browser continues."""

    name: str
    path: str
    route: Route
    follow: Callable[[Any, RenderRow], Awaitable[AsyncGenerator[Chunk, None]]]
    #: The template of one row.
    template: str
    query: type[msgspec.Struct]


class LiveEndpoint:
    """The application of one live view, in a form that Starlette does not mistake for a request handler."""

    def __init__(self, serve: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(scope, receive, send)


async def send_rows(
    state: ServerState, token: str, session: BrowserSession | None, rows: AsyncGenerator[Chunk, None],
    receive: Receive, send: Send, headers: dict[str, str],
) -> None:  # fmt: skip
    """Send rows until the browser disconnects or the server drains."""
    lines = Lines(lambda _: rows, live=True, events=True)
    limits = {"send_s": state.settings.send_s, "deadline_s": state.settings.request_s}
    sender = StreamSender(receive, send, state.live, state.gate.is_current, token=token, session=session, **limits)
    await sender.run(lines, events=True, headers=[(name.encode(), value.encode()) for name, value in headers.items()])
