"""Graceful shutdown of long-running commands on SIGINT and SIGTERM."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import typer

#: The exit code of a command that was interrupted.
INTERRUPTED = 128 + signal.SIGINT
NUMBERS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signals(stop: Callable[[], object]) -> Iterator[None]:
    """Call `stop` at the first SIGINT or SIGTERM; exit immediately at the second.

    After the first, the body of the `with` block finishes its current work and returns. The exit code is then 130
    after SIGINT, as for every interrupted command, and 0 after SIGTERM, which a supervisor sends to stop a service.
    `stop` runs in a signal handler in the main thread: for asyncio, pass a function that uses `call_soon_threadsafe`.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received:  # a server may hang; exiting here is as safe as a crash
            os._exit(128 + number)
        received.append(number)
        stop()

    before = {number: signal.signal(number, handle) for number in NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if signal.SIGINT in received:
        raise typer.Exit(INTERRUPTED)
