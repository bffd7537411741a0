"""A gateway in front of the server: a write that may have passed it is never reported as `Unavailable`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

import tidebook
from tidebook import Event, OutcomeUnknown, Unavailable
from tidebook.remote import connection, journal

#: A gateway's answers, the last one for ever; None closes the connection without one.
Answers = list[int | None]


@asynccontextmanager
async def gateway(answers: Answers) -> AsyncIterator[str]:
    """Serve answers that are not Tidebook's, to any request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            sizes = [line.split(":")[1] for line in head.split("\r\n") if line.startswith("content-length:")]
            await reader.readexactly(int(sizes[0]) if sizes else 0)
            status = answers.pop(0) if len(answers) > 1 else answers[0]
            if status is not None:
                writer.write(f"HTTP/1.1 {status} x\r\ncontent-length: 4\r\nconnection: close\r\n\r\noops".encode())
                await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def append(book: tidebook.Book) -> None:
    await book.journal("orders").append("o-1", [Event("paid")])


async def purge(book: tidebook.Book) -> None:
    await book.journal("orders").purge("o-1")


@pytest.mark.parametrize("write", [append, purge])
@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([None, 503], OutcomeUnknown),  # sent, then refused by something else
        ([502], OutcomeUnknown),
        ([504], OutcomeUnknown),
        ([500], OutcomeUnknown),  # it failed in the middle
        ([503], Unavailable),
        ([404], Unavailable),
    ],
)
async def test_a_write_that_may_have_passed_the_gateway_has_an_unknown_outcome(
    monkeypatch: pytest.MonkeyPatch, write: Callable[[object], object], answers: Answers, error: type[Exception]
) -> None:
    monkeypatch.setattr(journal, "RETRY_S", 0.2)
    defaults = {"token": None, "tls_ca": None, "retry_s": 0.2}
    monkeypatch.setattr(connection.Connection.__init__, "__kwdefaults__", defaults)
    async with gateway([*answers]) as url, tidebook.open(url) as book:
        with pytest.raises(error) as raised:
            await write(book)  # type: ignore[misc]
    assert type(raised.value) is error
