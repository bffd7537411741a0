"""A book: everything that one folder, or one set of servers, holds."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from tidebook.core.clock import Clock, Ids, RandomIds, SystemClock
from tidebook.core.errors import InvalidInput
from tidebook.core.metrics import Metrics
from tidebook.wiring.settings import Settings, read_settings

if TYPE_CHECKING:
    from tidebook.log.port import Log
    from tidebook.store.port import StoreWriter


class Book:
    """Use it as `async with tidebook.open(...) as book`; its parts open when they are first used."""

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Clock | None = None,
        ids: Ids | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.settings = settings
        self.clock = clock or SystemClock()
        self.ids = ids or RandomIds()
        self.metrics = metrics or Metrics()
        self._stack = AsyncExitStack()
        self._log: Log | None = None
        self._store: StoreWriter | None = None

    @property
    def log(self) -> Log:
        """The log under this book."""
        if self._log is None:
            raise InvalidInput("the book is not open: use it as 'async with tidebook.open(...) as book'")
        return self._log

    @property
    def store(self) -> StoreWriter:
        """The store under this book."""
        if self._store is None:
            raise InvalidInput("the book is not open: use it as 'async with tidebook.open(...) as book'")
        return self._store

    async def __aenter__(self) -> Book:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()


def open(where: str | Path = "./tidebook-data") -> Book:
    """Open a book: a folder (made where it is missing), or a `tidebook.toml` that names log, store and sql.

    >>> async def first(folder):
    ...     async with open(folder) as book:
    ...         return book.settings.folder.name
    """
    return Book(read_settings(where))
