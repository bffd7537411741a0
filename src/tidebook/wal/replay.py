"""A replay: one pass over a region that gives each entry to its table's handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping

from tidebook.core.errors import InvalidInput
from tidebook.wal.entry import Entry
from tidebook.wal.names import table_id
from tidebook.wal.reading import Page, Run

Handler = Callable[[Entry], Awaitable[None] | None]
#: Told how far a replay is: offsets done, offsets in all.
OnProgress = Callable[[int, int], None]


class Replay:
    """Splits pages by table and counts; whoever drives it calls the handlers, in a thread of its choice."""

    def __init__(
        self, handlers: Mapping[int, Handler], *, other: Handler | None = None, progress: OnProgress | None = None
    ) -> None:
        if not isinstance(handlers, Mapping):
            raise InvalidInput(f"handlers is a mapping from table to handler, not {type(handlers).__name__}")
        for table, handler in handlers.items():
            _callable(handler, f"the handler of table {table_id(table)}")
        for name, value in (("other", other), ("progress", progress)):
            if value is not None:
                _callable(value, name)
        self._handlers = handlers
        self._other = other
        self._progress = progress
        #: How many entries each table's handler got.
        self.counts: dict[int, int] = {}

    def take(self, page: Page) -> Iterator[tuple[Handler, Run]]:
        """The page's runs, each with who gets its entries."""
        for run in page.runs:
            table = run[0].table
            handler = self._handlers.get(table, self._other)
            if handler is not None:
                yield handler, run
                self.counts[table] = self.counts.get(table, 0) + len(run)
        if self._progress is not None:
            self._progress(page.done, page.whole)


def _callable(value: object, what: str) -> None:
    if not callable(value):
        raise InvalidInput(f"{what} is something to call, not {type(value).__name__}")
