"""The book of this process."""

import threading

from django.conf import settings

import tidebook
from tidebook import SyncBook

_lock = threading.Lock()
_opened: SyncBook | None = None


def book() -> SyncBook:
    """Return the book of this process; a forked worker opens a separate one."""
    global _opened
    with _lock:
        if _opened is None or _opened.forked:
            _opened = tidebook.open_sync(settings.BOOK)
            _opened.__enter__()
            _opened.outbox.create_tables()
        return _opened


def close_book() -> None:
    """Close the book, at the end of a test or program."""
    global _opened
    if _opened is not None:
        _opened.__exit__(None, None, None)
        _opened = None
