"""Commands on hot entities compared with eventsourcing; loads with snapshots; typed compared with raw reads.

Run it alone: `python -m bench.domain_parts.entities`.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from eventsourcing.application import Application
from eventsourcing.domain import Aggregate, event

import tidebook
from bench.domain_parts.accounts import Account, Deposit, Deposited
from bench.timing import timed

ENTITIES, CLIENTS, COMMANDS, PEER_COMMANDS = 64, 20, 10, 1_000
LONG, SHORT, EVERY, EVENTS, ROUNDS = 10_000, 100, 100, 10_000, 7
TARGETS = {"execute_vs_eventsourcing": 5.0, "load_long_vs_short": 2.0, "typed_vs_raw_read": 1.3}


class PeerAccount(Aggregate):
    """The same account as an aggregate of eventsourcing."""

    def __init__(self) -> None:
        self.balance = 0

    @event("Deposited")
    def deposit(self, amount: int) -> None:
        """Deposit an amount."""
        self.balance += amount


def peer_rate(folder: Path) -> float:
    """Return the commands per second with eventsourcing on a SQLite file: each gets, changes and saves an aggregate."""
    environment = {"PERSISTENCE_MODULE": "eventsourcing.sqlite", "SQLITE_DBNAME": str(folder / "peer.db")}
    application: Application[Any] = Application(env=environment)
    accounts = [PeerAccount() for _ in range(ENTITIES)]
    application.save(*accounts)
    ids = [account.id for account in accounts]
    with timed("eventsourcing: get and save") as watch:
        for n in range(PEER_COMMANDS):
            account: Any = application.repository.get(ids[n % ENTITIES])
            account.deposit(amount=1)
            application.save(account)
    application.close()
    return watch.rate(PEER_COMMANDS)


async def execute_rate(folder: Path) -> float:
    """Return the commands per second that many clients execute on hot entities."""
    async with tidebook.open(folder) as book:
        accounts = book.decider("accounts", Account, events=[Deposited])
        await asyncio.gather(*(accounts.execute(f"a-{n}", Deposit(1)) for n in range(ENTITIES)))

        async def client(id: str) -> None:
            for _ in range(COMMANDS):
                await accounts.execute(id, Deposit(1))

        with timed("execute on hot entities") as watch:
            await asyncio.gather(*(client(f"a-{n}") for n in range(ENTITIES) for _ in range(CLIENTS)))
    return watch.rate(ENTITIES * CLIENTS * COMMANDS)


async def load_times_ms(folder: Path) -> dict[str, float]:
    """Return the median times of loading a long and a short entity that are not cached."""
    async with tidebook.open(folder) as book:
        accounts = book.decider("accounts", Account, events=[Deposited], snapshot_every=EVERY)
        for id, count in (("long", LONG), ("short", SHORT)):
            for _ in range(count // 50):
                await book.journal("accounts", events=[Deposited]).append(id, [Deposited(1)] * 49)
                await accounts.execute(id, Deposit(1))
        found: dict[str, list[float]] = {"long": [], "short": []}
        for _ in range(ROUNDS * 5):
            for id, times in found.items():
                fresh = book.decider("accounts", Account, events=[Deposited], snapshot_every=EVERY)
                began = time.perf_counter()
                await fresh.load(id)
                times.append((time.perf_counter() - began) * 1000)
    return {id: median(times) for id, times in found.items()}


async def read_times_ms(folder: Path) -> dict[str, float]:
    """Return the median times of reading events raw and typed, alternately."""
    async with tidebook.open(folder) as book:
        typed, raw = book.journal("accounts", events=[Deposited]), book.journal("accounts")
        for _ in range(EVENTS // 100):
            await typed.append("a-1", [Deposited(1)] * 100)
        found: dict[str, list[float]] = {"raw": [], "typed": []}
        for _ in range(ROUNDS):
            for name, journal in (("raw", raw), ("typed", typed)):
                began = time.perf_counter()
                assert len([event async for event in journal.read("a-1")]) == EVENTS
                found[name].append((time.perf_counter() - began) * 1000)
    return {name: median(times) for name, times in found.items()}


def measure() -> tuple[dict[str, float], dict[str, Any]]:
    """Return the ratios and the figures from which they were computed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours, peers = asyncio.run(execute_rate(folder / "execute")), peer_rate(folder)
        loads = asyncio.run(load_times_ms(folder / "load"))
        reads = asyncio.run(read_times_ms(folder / "read"))
    ratios = {
        "execute_vs_eventsourcing": ours / peers,
        "load_long_vs_short": loads["long"] / loads["short"],
        "typed_vs_raw_read": reads["typed"] / reads["raw"],
    }
    figures = {"execute_per_s": ours, "eventsourcing_per_s": peers, "load_ms": loads, "read_ms": reads}
    return ratios, figures


if __name__ == "__main__":
    print(json.dumps(dict(zip(("ratios", "figures"), measure(), strict=True))))
