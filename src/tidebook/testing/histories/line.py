"""The lines of a history: one JSON object each, as `docs/reference/histories.md` describes them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

LineType = Literal["invoke", "ok", "fail", "unknown"]


class HistoryLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of a history: a process began a call, or the call ended."""

    process: str
    #: Pairs the end of a call with its beginning, within the process.
    call: int
    op: str
    type: LineType
    #: The time by the monotonic clock of the machine, which all its processes share.
    ns: int
    args: dict[str, Any] = {}
    result: Any = None
    #: The name of the error's class, for `fail` and `unknown`.
    error: str | None = None


_decode = msgspec.json.Decoder(HistoryLine).decode
_encode = msgspec.json.Encoder().encode


class PendingCall:
    """A call whose beginning is recorded; record its end by calling one of the methods once."""

    def __init__(self, write: Callable[[HistoryLine], None], begun: HistoryLine, now_ns: Callable[[], int]) -> None:
        self._write = write
        self._begun = begun
        self._now_ns = now_ns

    def ok(self, result: Any = None) -> None:
        """Record that the call succeeded with this result."""
        self._end("ok", result, None)

    def fail(self, error: BaseException, result: Any = None) -> None:
        """Record that the call failed without an effect."""
        self._end("fail", result, type(error).__name__)

    def unknown(self, error: BaseException) -> None:
        """Record that the call may have had its effect, or may still have it later."""
        self._end("unknown", None, type(error).__name__)

    def _end(self, type: LineType, result: Any, error: str | None) -> None:
        begun = self._begun
        self._write(HistoryLine(begun.process, begun.call, begun.op, type, self._now_ns(), {}, result, error))


class HistoryFile:
    """Writes the lines of one process; each is passed to the kernel before its call returns, so kill -9 loses none."""

    def __init__(self, path: Path, process: str, *, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._process = process
        self._now_ns = now_ns
        self._calls = 0

    def begin(self, op: str, **args: Any) -> PendingCall:
        """Record that a call begins."""
        self._calls += 1
        begun = HistoryLine(self._process, self._calls, op, "invoke", self._now_ns(), args)
        self._write(begun)
        return PendingCall(self._write, begun, self._now_ns)

    def observe(self, op: str, result: Any, **args: Any) -> None:
        """Record an observation at this moment, as one line for a call without a duration."""
        self._calls += 1
        self._write(HistoryLine(self._process, self._calls, op, "ok", self._now_ns(), args, result))

    def _write(self, line: HistoryLine) -> None:
        os.write(self._file, _encode(line) + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def encode_line(line: HistoryLine) -> bytes:
    """Return a line as it is stored, without the newline."""
    return _encode(line)


def read_lines(files: Iterable[Path], *, after: Mapping[Path, int] | None = None) -> Iterator[HistoryLine]:
    """Yield the lines of all files; the last line of a file may be torn, because its process was killed.

    `after` is the number of bytes to skip at the start of each file.
    """
    for file in files:
        with file.open("rb") as opened:
            opened.seek((after or {}).get(file, 0))
            lines = opened.read().split(b"\n")
        for number, text in enumerate(lines, 1):
            if not text:
                continue
            try:
                yield _decode(text)
            except msgspec.MsgspecError as error:
                if number < len(lines):  # only the text after the last newline is torn
                    raise ValueError(f"{file}, line {number}: {error}") from error
