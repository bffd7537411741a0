"""How commands speak: tables and sentences on a terminal, one JSON object a line in a pipe or with --json."""

from __future__ import annotations

import base64
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec
from rich.console import Console

_human = True


def choose(*, json: bool) -> None:
    """Decide once, when the command starts."""
    global _human
    _human = not json and sys.stdout.isatty()


def human() -> bool:
    """Whether a person is looking."""
    return _human


console = Console(highlight=False)
#: Progress and warnings; never mixed into what a pipe reads.
aside = Console(stderr=True, highlight=False)


def emit(row: Mapping[str, Any], text: str | None = None) -> None:
    """One result: `text` for a person (or name: value pairs), the row as JSON otherwise."""
    if _human:
        line = text if text is not None else "  ".join(f"{name}: {shown(value)}" for name, value in row.items())
        console.print(line, markup=False, soft_wrap=True)
    else:
        sys.stdout.write(msgspec.json.encode(row, enc_hook=_plain).decode() + "\n")
        sys.stdout.flush()


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset | set):
        return sorted(value)
    return str(value)


def shown(value: Any) -> str:
    """A value as a person reads it."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds")
    if isinstance(value, str):
        return value
    return msgspec.json.encode(value, enc_hook=_plain).decode()
