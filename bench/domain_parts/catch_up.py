"""A projection that catches up into PostgreSQL, and a bare loop that executes the same upserts in batches of 500.

Run it alone: `python -m bench.domain_parts.catch_up URL [EVENTS]`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, create_engine
from sqlalchemy.dialects.postgresql import insert

import tidebook
from bench.domain_parts.accounts import Deposited
from bench.replication import replicate
from bench.timing import timed
from tidebook.replication.ticks import tick

EVENTS, JOURNALS, BATCH = 500_000, 5_000, 500
TARGETS = {"catch_up_vs_bare_loop": 0.6}
BALANCES = Table("bench_balances", MetaData(), Column("id", String(100), primary_key=True), Column("amount", Integer))
UPSERT = insert(BALANCES)
UPSERT = UPSERT.on_conflict_do_update(
    index_elements=["id"], set_={"amount": BALANCES.c.amount + UPSERT.excluded.amount}
)


def apply(tx: Any, event: Any) -> None:
    """Apply an event to the table."""
    tx.execute(UPSERT, {"id": event.id, "amount": event.data.amount})


def bare_rate(engine: Engine, events: int) -> float:
    """Return the upserts per second of a bare loop."""
    BALANCES.create(engine)
    with timed("bare loop") as watch:
        for start in range(0, events, BATCH):
            with engine.begin() as connection:
                for n in range(start, start + BATCH):
                    connection.execute(UPSERT, {"id": f"a-{n % JOURNALS}", "amount": 1})
    BALANCES.drop(engine)
    return watch.rate(events)


async def catch_up_rate(folder: Path, engine: Engine, events: int) -> float:
    """Return the events per second that the projection applies, from its start to the last event."""
    async with tidebook.open(folder) as book:
        journal = book.journal("accounts", events=[Deposited])
        with timed("append and replicate"):
            for start in range(0, events, JOURNALS):
                items = [(f"a-{n % JOURNALS}", [Deposited(1)]) for n in range(start, start + JOURNALS)]
                await journal.append_many(items)
            await replicate(book, "accounts")
            await tick(book.log, book.store, ["accounts"])
            await replicate(book, "accounts")
        # The name is new, because an earlier run may have left its offsets in a shared database.
        name = f"bench-{uuid.uuid4().hex}"
        projection = book.projection(name, topics=["accounts"], into=engine, tables=[BALANCES])(apply)
        with timed("catch-up") as watch:
            running = asyncio.create_task(projection.run())
            await projection.settle()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert projection.status().events == events
    return watch.rate(events)


def measure(url: str, events: int = EVENTS) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the ratio and its figures; `url` is SQLAlchemy's URL of a PostgreSQL database."""
    engine = create_engine(url)
    BALANCES.drop(engine, checkfirst=True)
    bare = bare_rate(engine, events)
    with tempfile.TemporaryDirectory() as name:
        ours = asyncio.run(catch_up_rate(Path(name), engine, events))
    BALANCES.drop(engine)
    engine.dispose()
    return {"catch_up_vs_bare_loop": ours / bare}, {"catch_up_per_s": ours, "bare_per_s": bare, "events": events}


if __name__ == "__main__":
    given = (sys.argv[1], int(sys.argv[2])) if len(sys.argv) > 2 else (sys.argv[1], EVENTS)
    print(json.dumps(dict(zip(("ratios", "figures"), measure(*given), strict=True))))
