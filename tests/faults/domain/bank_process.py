"""A process that is killed: it executes commands, or runs a projection, until it dies."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from sqlalchemy import create_engine

import tidebook
from tests.unit.domain.bank import EVENTS, Account, Deposit
from tests.unit.domain.projecting import BALANCES, add, replicating, sqlite_engine
from tidebook.domain import projection_runner


async def decide(folder: Path, start: int) -> None:
    """Execute commands in order, each under its id; print the number of each that is done."""
    async with tidebook.open(folder) as book:
        accounts = book.decider("accounts", Account, events=EVENTS, snapshot_every=7)
        number = start
        while True:
            await accounts.execute(f"a-{number % 5}", Deposit(1), command_id=f"c-{number}")
            print(number, flush=True)
            number += 1


async def project(folder: Path, url: str) -> None:
    """Run the projection, and replicate, until killed."""
    projection_runner.REBALANCE_S = 0.05  # type: ignore[misc]
    engine = create_engine(url) if url else sqlite_engine(folder)
    async with tidebook.open(folder) as book, replicating(book, "accounts"):
        projection = book.projection("balances", topics=["accounts"], into=engine, tables=[BALANCES], events=EVENTS)
        projection._settings = projection._settings.__class__(slices=16, retries=5, on_failure="stop", lease_s=0.3)
        projection(add)
        print("running", flush=True)
        await projection.run()


if __name__ == "__main__":
    what, folder, argument = sys.argv[1:]
    asyncio.run(decide(Path(folder), int(argument)) if what == "decide" else project(Path(folder), argument))
