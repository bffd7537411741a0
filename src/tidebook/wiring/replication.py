"""Run the replication of an embedded book as tasks of this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tidebook.core.errors import InvalidInput
from tidebook.log.port import Log
from tidebook.replication.inline import InlineReplication
from tidebook.runtime.clock import Clock
from tidebook.runtime.metrics import Metrics
from tidebook.sqlite.process_lock import ProcessLock
from tidebook.store.port import StoreWriter
from tidebook.wiring.settings import Settings
from tidebook.wiring.spark import clears_tags

#: The lock of the process that replicates; it is separate from the files that SQLite locks.
LOCK_FILE: Final = "replicate.lock"


def is_embedded(settings: Settings) -> bool:
    """Return whether log and store are in the book's folder, so that its processes can replicate."""
    return settings.section("log").embedded and settings.section("store").embedded


def require_embedded(settings: Settings, what: str = "replicate=True") -> None:
    """Raise `InvalidInput` if the log or the store is on a server."""
    if not is_embedded(settings):
        server = "log" if not settings.section("log").embedded else "store"
        raise InvalidInput(
            f"{what} needs an embedded log and store, and [{server}] has a url: "
            "run 'tidebook pipeline replicate', which replicates on Spark"
        )


def inline_replication(
    settings: Settings, log: Log, store: StoreWriter, *, clock: Clock, metrics: Metrics, topics: Sequence[str] = ()
) -> InlineReplication:
    """Return the replication of an embedded book, not started; with `topics`, it takes no lock."""
    lock = None if topics else ProcessLock(settings.folder.expanduser().absolute() / LOCK_FILE)
    return InlineReplication(
        log, store, clock=clock, metrics=metrics, lock=lock, clear_tags=clears_tags(settings), topics=topics
    )
