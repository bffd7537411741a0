"""Journals for threads without an event loop."""

from __future__ import annotations

from tidebook.journal.journal import Journal
from tidebook.runtime.blocking_facade import BlockingFacade, blocking, iterating
from tidebook.runtime.blocking_portal import BlockingPortal


class SyncJournal(BlockingFacade[Journal]):
    """The blocking form of `Journal`: all journals of a topic."""

    def __init__(self, portal: BlockingPortal, target: Journal) -> None:
        super().__init__(portal, target)
        self.topic = target.topic

    topic_config = blocking(Journal.topic_config)
    exists = blocking(Journal.exists)
    create = blocking(Journal.create)
    append = blocking(Journal.append)
    append_many = blocking(Journal.append_many)
    delete = blocking(Journal.delete)
    purge = blocking(Journal.purge)
    read = iterating(Journal.read)
    tail = iterating(Journal.tail)
    pointer = blocking(Journal.pointer)
    head = blocking(Journal.head)
    ids = iterating(Journal.ids)
    save_snapshot = blocking(Journal.save_snapshot)
    load_snapshot = blocking(Journal.load_snapshot)
    delete_snapshots = blocking(Journal.delete_snapshots)
    adopt = blocking(Journal.adopt)
