"""Tidebook: durable journals for Python services.

This module holds only the public names. Each one is imported at its first use, so `import tidebook` loads no driver.
"""

from __future__ import annotations

import sys
from importlib import import_module

#: Replaces `typing.TYPE_CHECKING`: importing `typing` would delay the handling of Ctrl-C by the command line.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

if sys.platform == "win32":  # processes share a book's files through POSIX locks
    raise ImportError("Tidebook runs on Linux and macOS; on Windows, run it in WSL 2")

if TYPE_CHECKING:
    from tidebook.core.action import NEVER
    from tidebook.core.errors import (
        Conflict,
        Corrupt,
        EventParked,
        Fenced,
        InvalidInput,
        LeaseLost,
        LogLost,
        MissingTaggedEvent,
        NotFound,
        OutcomeUnknown,
        ProjectionStopped,
        TidebookError,
        TooLarge,
        Truncated,
        Unavailable,
        UnknownEventType,
        UnknownVersion,
        UnreadableEvent,
    )
    from tidebook.core.event import Event, ReadEvent
    from tidebook.domain.event_type import event_type
    from tidebook.domain.typed_event import TypedEvent
    from tidebook.journal.journal import Snapshot
    from tidebook.journal.outcome import Appended
    from tidebook.pipeline.session import spark
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
    "EventParked",
    "Fenced",
    "InvalidInput",
    "LeaseLost",
    "LogLost",
    "MissingTaggedEvent",
    "NotFound",
    "OutcomeUnknown",
    "ProjectionStopped",
    "ReadEvent",
    "Snapshot",
    "SyncBook",
    "TidebookError",
    "TooLarge",
    "Truncated",
    "TypedEvent",
    "Unavailable",
    "UnknownEventType",
    "UnknownVersion",
    "UnreadableEvent",
    "__version__",
    "event_type",
    "open",
    "open_sync",
    "spark",
]

#: The module that defines each public name; all other names are errors of `tidebook.core.errors`.
_MODULES = {
    "NEVER": "tidebook.core.action",
    "Event": "tidebook.core.event",
    "ReadEvent": "tidebook.core.event",
    "TypedEvent": "tidebook.domain.typed_event",
    "event_type": "tidebook.domain.event_type",
    "Appended": "tidebook.journal.outcome",
    "spark": "tidebook.pipeline.session",
    "Snapshot": "tidebook.journal.journal",
    "Book": "tidebook.wiring.book",
    "open": "tidebook.wiring.book",
    "SyncBook": "tidebook.wiring.sync",
    "open_sync": "tidebook.wiring.sync",
}

if not TYPE_CHECKING:  # if a type checker saw `__getattr__`, it would accept any name

    def __getattr__(name: str) -> Any:
        """Import a public name at its first use, so that the command line handles Ctrl-C before heavy imports."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(_MODULES.get(name, "tidebook.core.errors")), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
