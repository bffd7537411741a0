"""Ensure that a process opens a file with only one SQLite library.

apsw contains its own copy of SQLite. Neither copy knows the file descriptors of the other, and closing any descriptor
of a file drops all POSIX locks that the process holds on it.
"""

from __future__ import annotations

import os
import sys
import weakref
from pathlib import Path
from typing import Any

from tidebook.core.errors import InvalidInput

#: Objects that have a file open through the standard library's sqlite3, with its path.
_by_standard_library: weakref.WeakKeyDictionary[Any, Path] = weakref.WeakKeyDictionary()


def opened_by_standard_library(holder: object, path: Path) -> None:
    """Record that `holder` has `path` open with the standard library; raise InvalidInput if apsw has it open."""
    apsw = sys.modules.get("apsw")
    for connection in () if apsw is None else apsw.connections():
        if _is_same(_name_of(connection), path):
            raise InvalidInput(
                f"{path} is open through apsw in this process, and the outbox opens it with the standard library's "
                "sqlite3: each would drop the locks of the other. Use sqlite3 there too, or run the relay and the "
                "outbox's other work in another process"
            )
    _by_standard_library[holder] = path


def closed_by_standard_library(holder: object) -> None:
    """Record that `holder` has closed its file."""
    _by_standard_library.pop(holder, None)


def refuse_apsw(connection: Any) -> None:
    """Raise InvalidInput if the file of an apsw connection is also open with the standard library's sqlite3."""
    name = _name_of(connection)
    for path in list(_by_standard_library.values()):
        if _is_same(name, path):
            raise InvalidInput(
                f"{path} is open through the standard library's sqlite3 in this process, by the outbox or its relay, "
                "and apsw has its own copy of SQLite: each would drop the other's locks. Publish with a connection of "
                "sqlite3, or run the relay in another process"
            )


def _name_of(connection: Any) -> str:
    try:
        return str(connection.filename)
    except Exception:  # the connection is closed
        return ""


def _is_same(name: str, path: Path) -> bool:
    try:
        return bool(name) and os.path.samefile(name, path)
    except OSError:
        return False
