"""The fuzz targets: each takes arbitrary bytes, and raises only if Tidebook handles them wrongly.

Rejecting input with one of Tidebook's errors is correct. A traceback, a response 500 or a value that does not survive a
round trip is a failure; so is a hang or unbounded memory, which the limits of the fuzzer and of the tests detect.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, MutableMapping
from functools import cache
from pathlib import Path
from typing import Any

from tidebook.core import record as records
from tidebook.core.action import Append
from tidebook.core.errors import TidebookError
from tidebook.core.event import Event, encode_event, restore_event, unpack_events
from tidebook.core.payload import decode_payload
from tidebook.queue import fields
from tidebook.server.app import ServerApp
from tidebook.server.console.catalog import new_console
from tidebook.server.state import ServerState
from tidebook.tags.event import decode_offset, encode_offset
from tidebook.wal import record as wal_records
from tidebook.wiring.book import Book
from tidebook.wiring.book import open as open_book
from tidebook.wiring.settings import SERVERS, read_settings, settings_from_json, settings_to_json

Target = Callable[[bytes], None]

LIMIT_BYTES = 1_000_000
TAG, TOPIC, ID = "paid", "orders", "o-1"
DEADLINE_S = 2.0
#: Words that would make a command wait for ever, start a server or other processes, or leave the folder.
NOT_RUN = {
    "up",
    "serve",
    "run",
    "bench",
    "work",
    "relay",
    "rebuild",
    "pipeline",
    "import",
    "backup",
    "restore",
    "doctor",
}
GROUPS = ("journal", "tags", "topics", "wal", "queue", "token", "audit", "outbox", "projection")


def record_codec(data: bytes) -> None:
    """Decode a journal's record, with the frame as given and with a valid one; check the round trip of the result."""
    for value in (data, records._frame.seal(data)):
        with contextlib.suppress(TidebookError):
            action = records.decode_record(value)
            again = records.decode_record(records.encode_record(action, limit_bytes=LIMIT_BYTES))
            assert again == action, (again, action)
            if isinstance(action, Append):
                for encoded in unpack_events(action.body):
                    event = restore_event(encoded)
                    assert restore_event(encode_event(event)) == event, event
        with contextlib.suppress(TidebookError):
            records.read_record(value, limit_bytes=LIMIT_BYTES)
        records.is_record(value)


def payload(data: bytes) -> None:
    """Decode the payload of an event, of any type."""
    if data:
        with contextlib.suppress(TidebookError):
            decode_payload(data[0], data[1:])


def wal_codec(data: bytes) -> None:
    """Decode a record of a write-ahead log and its payloads, with the frame as given and with a valid one."""
    for value in (data, wal_records.FRAME.seal(data)):
        with contextlib.suppress(TidebookError):
            record = wal_records.decode_record(value)
            if isinstance(record, wal_records.Write):
                list(wal_records.payloads_of(record, value))
        with contextlib.suppress(TidebookError):
            wal_records.read_record(value)


def settings(data: bytes) -> None:
    """Read a settings file, and all of its sections as a book does."""
    file = _folder() / "tidebook.toml"
    file.write_bytes(data)
    with contextlib.suppress(TidebookError):
        found = read_settings(file, environment={})
        repr(found)
        assert settings_to_json(settings_from_json(settings_to_json(found))) == settings_to_json(found)
        # Do not connect to servers that the input names, nor write to other folders.
        embedded = all(found.section(name).url is None for name in SERVERS)
        if embedded and _folder() in found.folder.resolve().parents:
            _run(_open_and_close(file))


async def _open_and_close(where: Path) -> None:
    async with open_book(str(where)):
        pass


def xml_declaration(data: bytes) -> None:
    """Read the fields of a queue from XML, and check data against them."""
    with contextlib.suppress(TidebookError):
        fields._fields_from_rows(fields.read_xml(data, "fuzzed.xml")).check({"to": "somebody"})


def toml_declaration(data: bytes) -> None:
    """Read the fields of a queue from TOML."""
    file = _folder() / "queue.toml"
    file.write_bytes(data)
    with contextlib.suppress(TidebookError):
        fields.fields_of(file)


def tag_offset(data: bytes) -> None:
    """Resume a stream by tag at an offset."""
    text = data.decode("latin-1")
    with contextlib.suppress(TidebookError):
        position = decode_offset(TAG, text)
        assert decode_offset(TAG, encode_offset(position)) == position

    book = _server().book

    async def read() -> None:
        with contextlib.suppress(TidebookError):
            async for _ in book.tags.read(TAG, after=text):
                pass

    _run(read())


def cli(data: bytes) -> None:
    """Run a command: its words are separated by NUL, and the first byte chooses the group of commands."""
    from tidebook.cli import app

    if not data:
        return
    words = [each.decode("utf-8", "surrogateescape") for each in data[1:].split(b"\0")]
    if NOT_RUN & set(words) or any(
        each.startswith(("--f", "-f", "--book", "-b", "--output", "/", ".")) for each in words
    ):
        return
    group = GROUPS[data[0] % len(GROUPS)]
    os.environ["TIDEBOOK"] = str(_folder() / "cli-book")
    os.environ[app.TRACEBACK_VARIABLE] = "1"
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = app.run([group, *words])
    assert code in {0, 1, 2, 3, 4, 5}, code


def http(data: bytes) -> None:
    """Send a request: its first line is `METHOD TARGET`, the rest is the body."""
    line, _, body = data.partition(b"\n")
    method, _, target = line.partition(b" ")
    path, _, query = target.partition(b"?")
    if not method.isalpha() or not path.startswith(b"/") or b"pipeline" in path:
        return
    status = _run(_request(_server(), method.decode().upper(), path, query, body))
    assert status < 500 or status in {503, 504}, f"{line!r}: {status}"


async def _request(server: _Server, method: str, path: bytes, query: bytes, body: bytes) -> int:
    from urllib.parse import unquote_to_bytes

    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), (b"request-timeout", b"1")]
    scope = {
        "type": "http", "http_version": "1.1", "method": method, "scheme": "http", "root_path": "",
        "path": unquote_to_bytes(path).decode("utf-8", "replace"), "raw_path": path, "query_string": query,
        "headers": [*headers, (b"content-length", str(len(body)).encode())],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
    }  # fmt: skip
    bodies = iter([{"type": "http.request", "body": body, "more_body": False}])
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return next(bodies, {"type": "http.disconnect"})

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async with asyncio.timeout(DEADLINE_S * 5):
        await server.app(scope, receive, send)
    return statuses[0] if statuses else 0


class _Server:
    """A server without sockets, on a book with one event."""

    def __init__(self) -> None:
        self.book: Book = _run(self._open())

    async def _open(self) -> Book:
        book = await open_book(str(_folder() / "book"), create=True, replicate=True).__aenter__()
        await book.journal(TOPIC).append(ID, [Event({"total": 3}, tags=[TAG])])
        self._state = ServerState(book)
        self._console = new_console(self._state)
        self.app = ServerApp(self._state, pages=self._console.application())
        return book

    async def close(self) -> None:
        await self._console.close()
        await self._state.close()
        await self.book.__aexit__(None, None, None)


@cache
def _server() -> _Server:
    return _Server()


def close() -> None:
    """Close what the targets have opened."""
    if _server.cache_info().currsize:
        _run(_server().close())
        _server.cache_clear()
    if _loop.cache_info().currsize:
        _loop().close()
        _loop.cache_clear()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def _run(program: Awaitable[Any]) -> Any:
    return _loop().run_until_complete(asyncio.ensure_future(program, loop=_loop()))


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tidebook-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder.resolve()


TARGETS: dict[str, Target] = {
    "record": record_codec,
    "payload": payload,
    "wal": wal_codec,
    "settings": settings,
    "xml": xml_declaration,
    "toml": toml_declaration,
    "tag-offset": tag_offset,
    "cli": cli,
    "http": http,
}
