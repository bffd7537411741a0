"""Bulk input: JSON values from standard input, one per line, written to a book or a region in batches."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from itertools import chain
from typing import Any, BinaryIO, TypeVar

from tidebook.cli import output
from tidebook.cli.command import run
from tidebook.cli.options import parse_payload
from tidebook.core.errors import InvalidInput
from tidebook.runtime.blocking_portal import BlockingPortal

#: The argument for the lines of standard input.
STDIN = ["-"]
#: A batch ends when no input has arrived for this long, so that the lines of a slow writer do not wait.
IDLE_S = 0.5
CHUNK_BYTES = 65_536
#: A batch ends at this many lines or bytes, so that it fits into one append or transaction.
BATCH_LINES_MAX = 1000
BATCH_BYTES_MAX = 250_000


def read_lines(stream: BinaryIO) -> Iterator[bytes | None]:
    """Yield the lines of a stream, and None whenever no input has arrived for `IDLE_S`."""
    try:
        file = stream.fileno()
    except OSError:  # without a file descriptor, `select` cannot wait for input
        yield from stream
        return
    pieces: list[bytes] = []
    while True:
        if not select.select([file], [], [], IDLE_S)[0]:
            yield None
            continue
        chunk = os.read(file, CHUNK_BYTES)
        if not chunk:
            break
        *ended, rest = chunk.split(b"\n")
        for line in ended:
            yield b"".join([*pieces, line])
            pieces.clear()
        pieces.append(rest)
    if last := b"".join(pieces):
        yield last


def read_batches(lines: Iterable[bytes | None]) -> Iterator[list[Any]]:
    """Yield the JSON values of the lines in batches; skip blank lines, and raise `InvalidInput` for a bad one.

    A None among the lines ends a batch: the values before it must not wait for further input.
    """
    batch: list[Any] = []
    size_bytes = number = 0
    for line in lines:
        if line is None:
            if batch:
                yield batch
                batch, size_bytes = [], 0
            continue
        number += 1
        if not line.strip():
            continue
        if batch and (len(batch) == BATCH_LINES_MAX or size_bytes + len(line) > BATCH_BYTES_MAX):
            yield batch
            batch, size_bytes = [], 0
        try:
            batch.append(parse_payload(line.decode().strip()))
        except (InvalidInput, UnicodeDecodeError) as error:
            if batch:
                yield batch
            raise InvalidInput(f"line {number} of standard input: {error}: the lines before it were written") from error
        size_bytes += len(line)
    if batch:
        yield batch


T = TypeVar("T")
Write = Callable[[T, list[Any]], Coroutine[Any, Any, object]]


def write(opening: AbstractAsyncContextManager[T], arguments: list[str], what: str, write_values: Write[T]) -> None:
    """Open a book, or a part of it, and write the JSON values of the arguments to it.

    `-` alone means the values of standard input.
    """
    if arguments == STDIN:
        _write_lines(opening, what, write_values)
        return
    if STDIN[0] in arguments:
        raise InvalidInput("- reads the values from standard input, and must be the only argument")
    values = [parse_payload(each) for each in arguments]

    async def open_and_write() -> None:
        async with opening as opened:
            await write_values(opened, values)

    run(open_and_write())


def _write_lines(opening: AbstractAsyncContextManager[T], what: str, write_values: Write[T]) -> None:
    """Write the lines of standard input, and show on a terminal how many are written.

    The main thread reads, so that Ctrl-C ends the wait for a line; what is opened runs in the portal's thread. It is
    opened, and created, with the first batch.
    """
    batches = read_batches(read_lines(sys.stdin.buffer))
    first = next(batches, None)
    if first is None:
        raise InvalidInput("standard input is empty: pass one JSON value per line")
    portal = BlockingPortal()
    try:
        opened = portal.run(opening.__aenter__())
        try:
            with output.progress_bar() as bar:
                task = bar.add_task(what, total=None)
                for batch in chain([first], batches):
                    _finish(portal.submit(write_values(opened, batch)))
                    bar.advance(task, len(batch))
        finally:
            portal.run(opening.__aexit__(None, None, None))
    finally:
        portal.close()


def _finish(batch: Future[object]) -> None:
    """Wait for a batch even after a first Ctrl-C, so that what it wrote is reported; a second Ctrl-C cancels it."""
    try:
        batch.result()
    except KeyboardInterrupt:
        try:
            batch.result()
        except BaseException:
            batch.cancel()
            raise
        raise
