"""Output of commands: text on a terminal, one JSON object per line in a pipe or with --json."""

from __future__ import annotations

import base64
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, TextIO, cast

import msgspec

from tidebook.runtime.json_log import is_json

if TYPE_CHECKING:
    from rich.progress import Progress

#: Whether standard output is text for a person, not JSON.
_human = True
#: Whether the exit code is the result, so that a closed pipe does not end the command.
_is_check = False


class OutputFailed(Exception):
    """Standard output cannot be written. It is not an `OSError`, so that no handler for other I/O errors catches it."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


class GuardedOutput:
    """Wraps standard output and raises `OutputFailed` for each failed write, even of help texts and live displays."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text."""
        try:
            return self._stream.write(text)
        except OSError as error:
            raise OutputFailed(error) from error

    def flush(self) -> None:
        """Flush the buffer."""
        try:
            self._stream.flush()
        except OSError as error:
            raise OutputFailed(error) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def guarded() -> Iterator[None]:
    """Replace standard output by a `GuardedOutput`, and flush it at the end.

    JSON in a pipe is UTF-8 in every locale; a character that a terminal's encoding lacks is escaped.
    """
    stream = sys.stdout
    if isinstance(stream, TextIOWrapper):
        encoding = stream.encoding if stream.isatty() else "utf-8"
        stream.reconfigure(encoding=encoding, errors="backslashreplace")
    sys.stdout = cast(TextIO, GuardedOutput(stream))
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout = stream


def choose(*, json: bool, check: bool = False) -> None:
    """Choose between text and JSON; call it once, when the command starts.

    With `check` the exit code is the result, so the command runs to its end even if the reader closes the pipe.
    """
    global _human, _is_check
    _human = not json and sys.stdout.isatty()
    _is_check = check


def human() -> bool:
    """Return True if the output is text for a person."""
    return _human


def note(text: str) -> None:
    """Print a line for a person on standard error; with --log-json it is a line of the log.

    A standard error that is full or closed is ignored: the command's work must not depend on it.
    """
    if is_json():
        logging.getLogger("tidebook.cli").info("%s", text)
        return
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def progress_bar() -> Progress:
    """Return progress bars on standard error, one per task; hidden with --json and if an output is not a terminal."""
    # Imported only here: rich takes a fifth of the start of a command, and most commands do not use it.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    shown = _human and sys.stderr.isatty()
    return Progress(*columns, console=Console(stderr=True, highlight=False), disable=not shown)


def emit(found: Mapping[str, Any] | msgspec.Struct, text: str | None = None, **more: Any) -> None:
    """Print one result: `text` (by default `name: value` pairs) for a person, otherwise the fields as JSON.

    A field of `more` replaces the field of the same name.
    """
    row = {**(found if isinstance(found, Mapping) else msgspec.to_builtins(found, builtin_types=(bytes,))), **more}
    if _human:
        line = text if text is not None else "  ".join(f"{name}: {format_value(value)}" for name, value in row.items())
    else:
        line = msgspec.json.encode(row, enc_hook=_plain).decode()
    write(f"{line}\n")


def note_empty(text: str) -> None:
    """Print a line for a person in place of an empty list; print nothing otherwise."""
    if _human:
        write(f"{text}\n")


class Table:
    """Rows of one kind: columns below a header for a person, otherwise one JSON object per line."""

    def __init__(self, *columns: str) -> None:
        self._columns = columns
        self._rows: list[tuple[object, ...]] = []

    def add(self, found: Mapping[str, Any] | msgspec.Struct, *cells: object, **more: Any) -> None:
        """Add a row: `cells` are for a person; in JSON mode the fields, with those of `more`, are printed at once."""
        if _human:
            self._rows.append(cells)
        else:
            emit(found, **more)

    def print(self, empty: str) -> None:
        """Print the rows for a person, numbers right-aligned; if there are none, print `empty` instead."""
        if not self._rows:
            note_empty(empty)
            return
        rows = [[_format_cell(cell) for cell in row] for row in self._rows]
        widths = [max(map(len, column)) for column in zip(self._columns, *rows, strict=True)]
        is_number = [all(isinstance(cell, int) for cell in column) for column in zip(*self._rows, strict=True)]
        for row in ([name.upper() for name in self._columns], *rows):
            aligned = [
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(row, widths, is_number, strict=True)
            ]
            write("  ".join(aligned).rstrip() + "\n")


def _format_cell(cell: object) -> str:
    if cell is None:
        return "-"
    return f"{cell:,}" if isinstance(cell, int) else format_value(cell)


def write(text: str) -> None:
    """Write text to standard output and flush it; raise `OutputFailed` if that fails."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OutputFailed as failed:
        if not _is_check or not isinstance(failed.error, BrokenPipeError):
            raise
        discard()


def discard() -> None:
    """Redirect standard output, including its buffered text, to the null device."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset | set):
        return sorted(value)
    return str(value)


def describe_type(type: str | None, version: int) -> str:
    """Return the type and version of an event as the prefix of its line; empty if it has no type."""
    return "" if type is None else f"{format_value(type)} v{version}  "


def format_value(value: Any) -> str:
    """Return a value as text for a person; control characters are escaped, because they could control the terminal."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime):
        return format_time(value)
    if isinstance(value, str) and value.isprintable():
        return value
    return msgspec.json.encode(value, enc_hook=_plain).decode()


def payload_as_json(payload: Any) -> Any:
    """Return a payload as a JSON value; bytes become base64."""
    return {"base64": base64.b64encode(payload).decode()} if isinstance(payload, bytes) else payload


def fields_of(event: object, *names: str) -> dict[str, Any]:
    """Return the named fields of an event, a snapshot or an entry as JSON values."""
    row = {name: payload_as_json(getattr(event, name)) for name in names}
    for name, value in row.items():
        if isinstance(value, datetime):
            row[name] = format_time(value)
        elif isinstance(value, frozenset):
            row[name] = sorted(value)
    return row


def format_time(time: datetime) -> str:
    """Return a time in ISO 8601 with milliseconds."""
    return time.isoformat(timespec="milliseconds")
