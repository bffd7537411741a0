"""The embedded log's index by key finds the same records as a plain list, also after truncation."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tidebook.core.errors import Corrupt, LogLost
from tidebook.log.port import Acknowledged, Outgoing, read_all
from tidebook.log.sqlite import SqliteLog, writes


async def test_every_key_is_found_over_every_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "SWEEP_MAX", 5)
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


async def test_truncated_or_deleted_records_leave_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "SWEEP_MAX", 5)
    seeded = random.Random(3)
    log = SqliteLog(tmp_path)
    rows = "SELECT (SELECT count(*) FROM record), (SELECT count(*) FROM partition), (SELECT count(*) FROM topic)"
    for _ in range(3):
        await log.create_topic("t", 2)
        sent = kept_records = 0
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
            else:
                kept_records = end - end // 2
        with log._database.reading() as connection:
            kept: Any = connection.execute("SELECT count(*) FROM record").get
        assert kept == kept_records
        await log.delete_topic("t")
        with log._database.reading() as connection:
            assert connection.execute(rows).fetchall() == [(0, 0, 0)]
    await log.close()


async def test_records_that_another_instance_appends_are_found(tmp_path: Path) -> None:
    log, other = SqliteLog(tmp_path), SqliteLog(tmp_path)
    await log.create_topic("t", 1)
    for i in range(20):
        sent: Acknowledged = await other.append(Outgoing("t", 0, b"k%d" % (i % 3), b"v"))
        found = await read_all(log, "t", 0, start=0, stop=sent.offset + 1, key=b"k1")
        assert [each.offset for each in found] == list(range(1, i + 1, 3))
    await log.close()
    await other.close()


async def test_a_reader_keeps_up_with_a_writer(tmp_path: Path) -> None:
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


async def test_a_reader_overtaken_by_truncation_gets_a_whole_page_or_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writes, "SWEEP_MAX", 7)
    log, other = SqliteLog(tmp_path), SqliteLog(tmp_path)
    await log.create_topic("t", 1)
    count = 2_000
    await asyncio.gather(*(log.append(Outgoing("t", 0, b"k", b"%d" % i)) for i in range(count)))
    truncating = asyncio.create_task(log.truncate("t", 0, before=count - 10))
    lost = 0
    while not truncating.done() or not lost:
        for key in (None, b"k"):
            try:
                page = await other.read("t", 0, start=5, stop=count, key=key, limit=count)
            except LogLost as error:
                found, expected = [error.first, error.last], [5, count - 11]
                lost += 1
            else:
                found, expected = [each.offset for each in page.records], list(range(5, count))
            assert found == expected
        await asyncio.sleep(0)
    await truncating
    await log.close()
    await other.close()


async def test_a_missing_record_is_reported_as_damage(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path)
    await log.create_topic("t", 1)
    for i in range(5):
        await log.append(Outgoing("t", 0, b"k", b"%d" % i))
    with log._database.writing as connection:
        connection.execute("DELETE FROM record WHERE value = ?", (b"2",))
    assert len((await log.read("t", 0, start=3, stop=5)).records) == 2
    with pytest.raises(Corrupt, match="missing"):
        await log.read("t", 0, start=0, stop=5)
    await log.close()
