"""After a replicator is killed, each event has one tag number and one position, whatever was written or lost."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import tidebook
from tidebook.core.event import Event
from tidebook.replication.ticks import tick
from tidebook.sqlite.checksums import connect
from tidebook.tags.event import TaggedEvent
from tidebook.testing.replicating import replicate

#: Replicates the topic in batches of three records, and kills itself at the named point of its second batch.
REPLICATOR = textwrap.dedent(
    """
    import asyncio, os, signal, sys
    import tidebook
    from tidebook.replication.slice import plan_slice

    async def main(folder, moment):
        async with tidebook.open(folder) as book:
            config = await book.store.topic_config("t")
            for number in range(2):
                for partition in range(config.partitions):
                    pointer = await book.store.pointer("t", partition)
                    start = 0 if pointer is None else pointer.position.offset + 1
                    end = await book.log.end("t", partition)
                    if start >= end:
                        continue
                    page = await book.log.read("t", partition, start=start, stop=end, limit=3)
                    plan = await plan_slice(book.store, "t", partition, page.records, config)
                    if number == 1 and moment == "before":
                        os.kill(os.getpid(), signal.SIGKILL)
                    applying = asyncio.ensure_future(book.store.apply(plan.writes))
                    if number == 1 and moment == "during":
                        await asyncio.sleep(0)
                        os.kill(os.getpid(), signal.SIGKILL)
                    await applying
                    if number == 1 and moment == "after":
                        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(main(*sys.argv[1:]))
    """
)


async def fill(folder: Path) -> None:
    async with tidebook.open(folder) as book:
        for n in range(60):
            await book.journal("t").append(f"j-{n % 4}", [Event(n, tags={"paid"})])


async def settled(folder: Path) -> list[TaggedEvent]:
    async with tidebook.open(folder) as book:
        await replicate(book.log, book.store, "t", batch_records=5)
        await tick(book.log, book.store, ["t"])
        await replicate(book.log, book.store, "t")
        return [event async for event in book.tags.read("paid")]


def check(events: list[TaggedEvent], count: int = 60) -> None:
    assert sorted(event.payload for event in events) == list(range(count))
    for number in range(4):
        own = [event for event in events if event.id == f"j-{number}"]
        assert [event.payload for event in own] == list(range(number, count, 4))
        assert [event.tag_seq_nr for event in own] == list(range(1, count // 4 + 1))


@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_events_of_a_killed_replicator_are_written_once_by_the_next(tmp_path: Path, moment: str) -> None:
    asyncio.run(fill(tmp_path))
    done = subprocess.run([sys.executable, "-c", REPLICATOR, str(tmp_path), moment], timeout=120, check=False)
    assert done.returncode == -9
    check(asyncio.run(settled(tmp_path)))


@pytest.mark.parametrize("lost", ["nothing", "progress"])
def test_tag_numbers_continue_whether_progress_was_written_or_lost(tmp_path: Path, lost: str) -> None:
    asyncio.run(fill(tmp_path))
    before = asyncio.run(settled(tmp_path))
    if lost == "progress":
        connection = connect(tmp_path / "store.db")
        connection.execute("DELETE FROM tag_views_progress")
        connection.close()

    async def more() -> None:
        async with tidebook.open(tmp_path) as book:
            for n in range(60, 80):
                await book.journal("t").append(f"j-{n % 4}", [Event(n, tags={"paid"})])

    asyncio.run(more())
    after = asyncio.run(settled(tmp_path))
    check(after, 80)
    assert after[:60] == before
