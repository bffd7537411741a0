"""Tidebook: durable journals for Python services.

Only names are here; importing the package loads no driver.
"""

from tidebook.core.action import NEVER
from tidebook.core.errors import (
    Conflict,
    Corrupt,
    Fenced,
    InvalidInput,
    LeaseLost,
    LogLost,
    MissingTaggedEvent,
    NotFound,
    OutcomeUnknown,
    TidebookError,
    TooLarge,
    Truncated,
    Unavailable,
    UnknownVersion,
)
from tidebook.core.event import Event, ReadEvent
from tidebook.journal.outcome import Appended
from tidebook.journal.snapshots import Snapshot
from tidebook.wiring.book import Book, open
from tidebook.wiring.sync import SyncBook, open_sync

__version__ = "0.1.0"

__all__ = [
    "NEVER",
    "Appended",
    "Book",
    "Conflict",
    "Corrupt",
    "Event",
    "Fenced",
    "InvalidInput",
    "LeaseLost",
    "LogLost",
    "MissingTaggedEvent",
    "NotFound",
    "OutcomeUnknown",
    "ReadEvent",
    "Snapshot",
    "SyncBook",
    "TidebookError",
    "TooLarge",
    "Truncated",
    "Unavailable",
    "UnknownVersion",
    "__version__",
    "open",
    "open_sync",
]
