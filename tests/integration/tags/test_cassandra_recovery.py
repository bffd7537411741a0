"""Replicators are killed at single writes to Cassandra: each event has one tag number and one position."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path

import pytest

import tidebook
from tidebook.core.event import Event
from tidebook.replication.ticks import tick
from tidebook.tags.event import TaggedEvent
from tidebook.testing.replicating import replicate

pytestmark = pytest.mark.cassandra

#: Writes before the nth one are acknowledged, in this order: tag rows, buckets, progress; events; heads; the pointer.
KILLER = textwrap.dedent(
    """
    import asyncio, os, signal, sys
    import tidebook
    from tidebook.testing.replicating import replicate

    async def main(toml, topic, last):
        async with tidebook.open(toml) as book:
            pass_on, left = book.store.write, int(last)

            async def write(batch):
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                await pass_on(batch)

            book.store.write = write
            await replicate(book.log, book.store, topic, batch_records=4)

    asyncio.run(main(*sys.argv[1:]))
    """
)


@pytest.fixture
def toml(tmp_path: Path, cassandra_address: str) -> Path:
    path = tmp_path / "tidebook.toml"
    path.write_text(
        f'[store]\nurl = "cassandra://{cassandra_address}/tag_recovery"\nin_flight_max = 1\n[journal]\npartitions = 1\n'
    )
    return path


async def fill(toml: Path, topic: str, tag: str) -> None:
    async with tidebook.open(toml) as book:
        for n in range(12):
            await book.journal(topic).append(f"j-{n % 2}", [Event(n, tags={tag}), Event("other")])
        await book.journal(topic).delete("j-0", to=2)


async def settled(toml: Path, topic: str, tag: str) -> list[TaggedEvent]:
    async with tidebook.open(toml) as book:
        await replicate(book.log, book.store, topic, batch_records=5)
        await tick(book.log, book.store, [topic])
        await replicate(book.log, book.store, topic)
        return [event async for event in book.tags.read(tag, topics=[topic])]


def test_a_replicator_killed_at_any_write_and_the_next_one_write_each_event_once(toml: Path, long_form: bool) -> None:
    kills = 0
    for last in range(1, 60) if long_form else (2, 4, 9):
        topic, tag = f"t-{uuid.uuid4().hex[:12]}", f"tag-{uuid.uuid4().hex[:12]}"
        asyncio.run(fill(toml, topic, tag))
        argv = [sys.executable, "-c", KILLER, str(toml), topic, str(last)]
        done = subprocess.run(argv, timeout=120, check=False).returncode
        assert done in (0, -9)
        kills += done == -9
        events = asyncio.run(settled(toml, topic, tag))
        for id, payloads, first in (("j-0", [2, 4, 6, 8, 10], 2), ("j-1", [1, 3, 5, 7, 9, 11], 1)):
            of = [event for event in events if event.id == id]
            assert [event.payload for event in of] == payloads, last
            assert [event.tag_seq_nr for event in of] == list(range(first, first + len(payloads))), last
        if done == 0:
            break
    assert kills >= 3
