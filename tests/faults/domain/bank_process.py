"""A parent that forks the processes that are killed: each executes commands, or runs a projection, until it dies.

The parent has imported everything and opened nothing, so that a process starts within milliseconds. It takes lines
`decide FOLDER START ACKNOWLEDGED` and `project FOLDER URL`, and answers each with the process id.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import create_engine

import tidebook
from tests.unit.domain.bank import EVENTS, Account, Deposit
from tests.unit.domain.projecting import BALANCES, add, sqlite_engine
from tidebook.domain import projection_runner
from tidebook.replication import inline
from tidebook.runtime import supervisor

ACCOUNTS, CLIENTS = 5, 4


async def decide(folder: Path, start: int, acknowledged: Path) -> None:
    """Execute the commands from `start` on, each with a command id; write the number of each finished one to a file."""
    file = os.open(acknowledged, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    async with tidebook.open(folder) as book:
        accounts = book.decider("accounts", Account, events=EVENTS, snapshot_every=7)

        async def client(number: int) -> None:
            while True:
                await accounts.execute(f"a-{number % ACCOUNTS}", Deposit(1), command_id=f"c-{number}")
                os.write(file, f"{number}\n".encode())
                number += CLIENTS

        await asyncio.gather(*(client(start + n) for n in range(CLIENTS)))


async def project(folder: Path, url: str) -> None:
    """Run the projection and the replication until killed."""
    projection_runner.REBALANCE_S = 0.05  # type: ignore[misc]
    projection_runner.OUTAGE_MAX_S = 0.2  # type: ignore[misc]
    supervisor.RESTART_MAX_S = 0.5  # type: ignore[misc]
    inline.LOCK_EVERY_S = 0.05
    engine = create_engine(url) if url else sqlite_engine(folder)
    async with tidebook.open(folder, replicate=True) as book:
        projection = book.projection("balances", topics=["accounts"], into=engine, tables=[BALANCES], events=EVENTS)
        projection._settings = msgspec.structs.replace(projection._settings, lease_s=0.5)
        async with book.running(projection(add)):
            await asyncio.Event().wait()


def fork(work: Coroutine[Any, Any, None]) -> int:
    """Run a coroutine in a new process; return its id."""
    child = os.fork()
    if child:
        work.close()
        return child
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        asyncio.run(work)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def main() -> None:
    """Fork until the input ends."""
    logging.disable(logging.CRITICAL)  # the tests cause outages, which need no log
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that killed children do not stay zombies
    print("ready", flush=True)
    for line in sys.stdin:
        what, folder, *more = line.rstrip("\n").split("\t")
        made = decide(Path(folder), int(more[0]), Path(more[1])) if what == "decide" else project(Path(folder), more[0])
        print(fork(made), flush=True)


if __name__ == "__main__":
    main()
