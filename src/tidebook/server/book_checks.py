"""Check whether the log and the store of a book answer."""

from __future__ import annotations

import asyncio
from typing import Final

from tidebook.api.health import CheckResponse
from tidebook.core.errors import TidebookError
from tidebook.runtime.futures import cancel_and_wait
from tidebook.wiring.book import Book

CHECK_S: Final = 5.0


class BookChecks:
    """Asks the log and the store for their topics; concurrent requests share one check.

    A client needs no token to ask whether the server is ready, so such requests must not flood the book.
    """

    def __init__(self, book: Book) -> None:
        self._book = book
        self._running: asyncio.Task[list[CheckResponse]] | None = None

    async def run(self) -> list[CheckResponse]:
        """Return the result for the log and that for the store."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        return await asyncio.shield(self._running)

    async def _run(self) -> list[CheckResponse]:
        checks: list[CheckResponse] = []
        for name, check in (("log", self._book.log.topics), ("store", self._book.store.topics)):
            reason = None
            try:
                async with asyncio.timeout(CHECK_S):
                    await check()
            except TimeoutError:
                reason = f"it does not answer within {CHECK_S:g} s"
            except TidebookError as error:
                reason = str(error)
            checks.append(CheckResponse(name, reason is None, reason))
        return checks

    async def close(self) -> None:
        """Cancel a check that is running."""
        await cancel_and_wait(self._running)
