"""The embedded log's index by key finds what a plain list would, run borders, merges and truncation included."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tidebook.core.errors import LogLost
from tidebook.log.port import Acknowledged, Outgoing, read_all
from tidebook.log.sqlite import SqliteLog, key_runs
from tidebook.log.sqlite.key_runs import runs_between
from tidebook.log.sqlite.reading import LogReader, PageRequest


@pytest.mark.parametrize("indexed_to", [0, 2048, 2048 * 15, 2048 * 16, 2048 * 35])
def test_runs_cover_a_range_once_and_without_holes(indexed_to: int) -> None:
    for start in range(0, indexed_to + 1, 777):
        for stop in (start, start + 1, start + 5000, indexed_to, indexed_to + 9):
            covered = [offset for first, count in runs_between(start, stop, indexed_to) for offset in (first, count)]
            ends = [first + count for first, count in zip(covered[::2], covered[1::2], strict=True)]
            assert covered[2::2] == ends[:-1]
            if start < min(stop, indexed_to):
                assert covered[0] <= start
                assert min(stop, indexed_to) <= ends[-1] <= indexed_to


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and lists of a few, so that their borders are met."""
    monkeypatch.setattr(key_runs, "RUN_RECORDS", 8)
    monkeypatch.setattr("tidebook.log.sqlite.append.RUN_RECORDS", 8)
    monkeypatch.setattr(key_runs, "MERGED_RUNS", 4)
    monkeypatch.setattr("tidebook.log.sqlite.append.CHUNKS_PER_LISTING", 3)
    monkeypatch.setattr("tidebook.log.sqlite.chunk_directory.CHUNKS_PER_FETCH", 2)
    monkeypatch.setattr("tidebook.log.sqlite.topic_writes.SWEEP_MAX", 5)


async def test_every_key_is_found_over_every_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)
    seeded = random.Random(7)
    log = SqliteLog(tmp_path)
    await log.create_topic("t", 1)
    keys: list[bytes | None] = []
    for _ in range(40):
        some = [seeded.choice([None, b"a", b"b", b"c", b"%d" % len(keys)]) for _ in range(seeded.randrange(1, 9))]
        await asyncio.gather(*(log.append(Outgoing("t", 0, key, b"v")) for key in some))
        keys += some
        start, stop = sorted(seeded.sample(range(len(keys) + 1), 2))
        page = await read_all(log, "t", 0, start=start, stop=stop)
        assert [(each.offset, each.key) for each in page] == list(enumerate(keys))[start:stop]
        for key in (b"a", b"b", b"c", b"0", b"%d" % (len(keys) - 1), b"none"):
            found = await read_all(log, "t", 0, start=start, stop=stop, key=key)
            assert [each.offset for each in found] == [i for i in range(start, stop) if keys[i] == key]
            assert all(each.key == key for each in found)
    for before in range(0, len(keys), 7):
        await log.truncate("t", 0, before=before)
        found = await read_all(log, "t", 0, start=before, stop=len(keys), key=b"a")
        assert [each.offset for each in found] == [i for i in range(before, len(keys)) if keys[i] == b"a"]
        assert len(await read_all(log, "t", 0, start=before, stop=len(keys))) == len(keys) - before
    await log.close()


async def test_what_is_truncated_or_deleted_leaves_no_rows_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small(monkeypatch)
    seeded = random.Random(3)
    log = SqliteLog(tmp_path)
    rows = "SELECT (SELECT count(*) FROM chunk), (SELECT count(*) FROM key_run), (SELECT count(*) FROM directory)"
    for _ in range(3):
        await log.create_topic("t", 2)
        sent = 0
        while sent < 200:
            count = seeded.randrange(1, 6)
            await asyncio.gather(*(log.append(Outgoing("t", i % 2, b"k", b"v")) for i in range(count)))
            sent += count
        for partition in (0, 1):
            end = await log.end("t", partition)
            await log.truncate("t", partition, before=end // 2)
            assert len(await read_all(log, "t", partition, start=end // 2, stop=end)) == end - end // 2
            if partition:
                await log.truncate("t", partition, before=end)
        with log._database.reading() as connection:
            chunks: Any = connection.execute("SELECT count(*) FROM chunk").get
        assert 0 < chunks < 70
        await log.delete_topic("t")
        with log._database.reading() as connection:
            assert connection.execute(rows).fetchall() == [(0, 0, 0)]
    await log.close()


async def test_keys_that_share_a_hash_stay_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_runs, "key_hash", lambda key: 5 << 32)
    monkeypatch.setattr(key_runs, "RUN_RECORDS", 4)
    monkeypatch.setattr("tidebook.log.sqlite.append.RUN_RECORDS", 4)
    log = SqliteLog(tmp_path)
    await log.create_topic("t", 1)
    for i in range(10):
        await log.append(Outgoing("t", 0, b"%d" % (i % 2), b"v"))
    found = await read_all(log, "t", 0, start=0, stop=10, key=b"1")
    assert [each.offset for each in found] == [1, 3, 5, 7, 9]
    await log.close()


async def test_what_another_instance_appends_is_found(tmp_path: Path) -> None:
    log, other = SqliteLog(tmp_path), SqliteLog(tmp_path)
    await log.create_topic("t", 1)
    for i in range(20):
        sent: Acknowledged = await other.append(Outgoing("t", 0, b"k%d" % (i % 3), b"v"))
        found = await read_all(log, "t", 0, start=0, stop=sent.offset + 1, key=b"k1")
        assert [each.offset for each in found] == list(range(1, i + 1, 3))
    await log.close()
    await other.close()


async def test_a_reader_keeps_up_with_runs_that_are_merged_under_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_runs, "RUN_RECORDS", 4)
    monkeypatch.setattr("tidebook.log.sqlite.append.RUN_RECORDS", 4)
    monkeypatch.setattr(key_runs, "MERGED_RUNS", 2)
    log, other = SqliteLog(tmp_path), SqliteLog(tmp_path)
    await log.create_topic("t", 1)
    count = 2000
    sent = 0

    async def send() -> None:
        nonlocal sent
        for first in range(0, count, 50):
            await asyncio.gather(
                *(log.append(Outgoing("t", 0, b"%d" % (i % 3), b"")) for i in range(first, first + 50))
            )
            sent = first + 50

    sending = asyncio.create_task(send())
    while sent < count:
        stop = sent
        found = await read_all(other, "t", 0, start=0, stop=stop, key=b"1")
        assert [each.offset for each in found] == list(range(1, stop, 3))
        await asyncio.sleep(0)
    await sending
    await log.close()
    await other.close()


async def test_a_reader_overtaken_by_truncation_in_the_middle_of_a_page_is_told(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path)
    await log.create_topic("t", 1)
    for i in range(30):
        await log.append(Outgoing("t", 0, b"k", b"%d" % i))
    reading, guarded = log._reader, log._database.reading()
    with guarded as connection:
        bounds = reading.bounds(connection, "t", 0)
    await log.truncate("t", 0, before=20)
    for key in (None, b"k"):
        known, fresh = [bounds], LogReader.bounds
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LogReader, "bounds", lambda *at: known.pop() if known else fresh(*at))  # noqa: B023
            with pytest.raises(LogLost) as lost, guarded as connection:
                reading.page(connection, PageRequest("t", 0, 5, 30, 1000, 10**6), key)
        assert (lost.value.first, lost.value.last) == (5, 19)
    await log.close()
