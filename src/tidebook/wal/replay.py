"""Replay a region: dispatch the entries of each page to the handlers of their tables."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping

from tidebook.core.errors import InvalidInput
from tidebook.wal.entry import WalEntry
from tidebook.wal.names import table_id
from tidebook.wal.reading import EntryPage, Run

Handler = Callable[[WalEntry], Awaitable[None] | None]
#: Called with the progress of a replay: offsets done, offsets in total.
OnProgress = Callable[[int, int], None]


class Replay:
    """Choose the handler for each run of entries and count them; the caller invokes the handlers, in its own thread."""

    def __init__(
        self, handlers: Mapping[int, Handler], *, other: Handler | None = None, progress: OnProgress | None = None
    ) -> None:
        if not isinstance(handlers, Mapping):
            raise InvalidInput(f"handlers is a mapping from table to handler, not {type(handlers).__name__}")
        for table, handler in handlers.items():
            _check_callable(handler, f"the handler of table {table_id(table)}")
        for name, value in (("other", other), ("progress", progress)):
            if value is not None:
                _check_callable(value, name)
        self._handlers = handlers
        self._other = other
        self._progress = progress
        #: How many entries of each table were handled.
        self.counts: dict[int, int] = {}

    def take(self, page: EntryPage) -> Iterator[tuple[Handler, Run]]:
        """Yield (handler, run) for each run of a page that has a handler; report progress after the last one."""
        for run in page.runs:
            table = run[0].table
            handler = self._handlers.get(table, self._other)
            if handler is not None:
                yield handler, run
                self.counts[table] = self.counts.get(table, 0) + len(run)
        if self._progress is not None:
            self._progress(page.done, page.total)


def _check_callable(value: object, what: str) -> None:
    if not callable(value):
        raise InvalidInput(f"{what} must be callable, not {type(value).__name__}")
