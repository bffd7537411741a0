"""The main functions of the processes of a run: play a role, or run a command of `tidebook`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

from faults.disk import FAIL_SIGNAL, HEAL_SIGNAL
from faults.plan import read_plan
from faults.roles.context import Context
from tidebook.core.errors import Unavailable

CLOCK_JUMP_MS = 3_600_000


def _roles() -> dict[str, Callable[[Context], Awaitable[None]]]:
    # These imports are here so that the process that starts all others loads no driver.
    from faults.roles import deciders, inspector, journals, messages, replicator, streams, wal

    return {
        "writer": journals.write,
        "remote": lambda context: journals.write(context, remote=True),
        "replicator": replicator.replicate,
        "consumer": streams.consume,
        "producer": messages.produce,
        "relay": messages.relay,
        "worker": messages.work,
        "wal": wal.own,
        "decider": deciders.decide,
        "inspector": inspector.inspect,
    }


def _log_to(file: str) -> None:
    """Redirect the process's output to a file."""
    log = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)


def play_role(role: str, name: str, folder: str, seed: int, log: str) -> None:
    """Play a role until SIGTERM."""
    _log_to(log)

    async def play() -> None:
        context = Context(read_plan(Path(folder)), name, seed)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, context.stopping.set)
        loop.add_signal_handler(signal.SIGUSR1, _jump, context, CLOCK_JUMP_MS)
        loop.add_signal_handler(signal.SIGUSR2, _jump, context, 0)
        if context.disk is not None:
            loop.add_signal_handler(FAIL_SIGNAL, setattr, context.disk, "is_faulty", True)
            loop.add_signal_handler(HEAL_SIGNAL, setattr, context.disk, "is_faulty", False)
        while not context.stopping.is_set():
            try:
                await _roles()[role](context)
                return
            except* Unavailable as errors:  # a server was down when the book was opened
                traceback.print_exc()
                context.report_restart(role, errors.exceptions[0])
            await context.pause(2.0)

    asyncio.run(play())


def _jump(context: Context, off_ms: int) -> None:
    context.clock.off_ms = off_ms


def run_command(arguments: list[str], log: str) -> None:
    """Run a command of `tidebook` until SIGTERM."""
    _log_to(log)
    from tidebook.cli.__main__ import main

    sys.argv = ["tidebook", *arguments]
    main()
