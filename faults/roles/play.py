"""The main functions of the processes of a run."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from faults.plan import read_plan
from faults.roles.context import Context


def _roles() -> dict[str, Callable[[Context], Awaitable[None]]]:
    # Imported here, so that the process that starts all others loads no driver.
    from faults.roles import inspector, journals, messages, replicator, streams, wal

    return {
        "writer": journals.write,
        "remote": lambda context: journals.write(context, remote=True),
        "replicator": replicator.replicate,
        "consumer": streams.consume,
        "producer": messages.produce,
        "relay": messages.relay,
        "worker": messages.work,
        "wal": wal.own,
        "inspector": inspector.inspect,
    }


def _log_to(file: str) -> None:
    """Send everything that the process prints to a file."""
    log = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)


def play_role(role: str, name: str, folder: str, seed: int, log: str) -> None:
    """Play a role until SIGTERM."""
    _log_to(log)

    async def play() -> None:
        context = Context(read_plan(Path(folder)), name, seed)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, context.stopping.set)
        await _roles()[role](context)

    asyncio.run(play())


def serve_book(book: str, port: int, log: str) -> None:
    """Run `tidebook serve` until SIGTERM."""
    _log_to(log)
    from tidebook.cli.__main__ import main

    sys.argv = ["tidebook", "serve", "--port", str(port), "--book", book]
    main()
