"""Run a server in a separate thread, so that a test can drive a real browser with blocking calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import tidebook
from tests.integration.server.running import served_book
from tidebook.api.access import NewTokenResponse, RoleName
from tidebook.runtime.clock import SystemClock
from tidebook.server.database import ServerDatabase
from tidebook.server.tokens import Tokens

R = TypeVar("R")
START_S = 60.0


class ServedConsole:
    """The address of a console, its book, and a way to use the book in the server's event loop."""

    def __init__(self, url: str, book: tidebook.Book, loop: asyncio.AbstractEventLoop) -> None:
        self.url = url
        self.book = book
        self._loop = loop

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine in the event loop of the book, and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def call(self, make: Callable[[tidebook.Book], Coroutine[Any, Any, R]]) -> R:
        """Run the coroutine that a function returns for the book."""
        return self.run(make(self.book))


@contextmanager
def served_console(where: Path, **options: Any) -> Iterator[ServedConsole]:
    """Serve a book and its console until the block ends; with `replicate`, also replicate it."""
    started: Future[ServedConsole] = Future()
    stop = asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    replicate = options.pop("replicate", True)

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        try:
            async with (
                tidebook.open(where, create=True, replicate=replicate) as book,
                served_book(book, **{"where": str(where), **options}) as url,
            ):
                started.set_result(ServedConsole(url, book, loops[0]))
                await stop.wait()
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            raise

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="served-console")
    thread.start()
    try:
        yield started.result(START_S)
    finally:
        if loops:
            loops[0].call_soon_threadsafe(stop.set)
        thread.join(START_S)


def create_token(folder: Path, role: RoleName, **options: Any) -> NewTokenResponse:
    """Create a token of a book before it is served."""

    async def create() -> NewTokenResponse:
        database = ServerDatabase(folder)
        try:
            return await Tokens(database, SystemClock()).create(role, role, **options)
        finally:
            await database.close()

    with ThreadPoolExecutor(1) as pool:  # Playwright runs a loop in this thread
        return pool.submit(lambda: asyncio.run(create())).result(START_S)
