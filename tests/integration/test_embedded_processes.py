"""Several processes on one folder: two write, a third reads, and an append wakes the others."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tidebook.log.port import Outgoing, read_all
from tidebook.log.sqlite import SqliteLog
from tidebook.sqlite import wakeups

WRITER = """
import asyncio, sys
from tidebook.log.sqlite import SqliteLog
from tidebook.log.port import Outgoing

async def main(folder, name, count):
    log = SqliteLog(folder)
    await log.create_topic("t", 2)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)

    async def send(writer):
        for n in range(count):
            await log.append(Outgoing("t", writer % 2, b"%s-%d" % (name, writer), b"%d" % n))

    await asyncio.gather(*(send(writer) for writer in range(8)))
    await log.close()

asyncio.run(main(sys.argv[1], sys.argv[2].encode(), int(sys.argv[3])))
"""

# Answers each record of partition 0 with one in partition 1; only wake-ups wake it.
ECHO = """
import asyncio, sys
from tidebook.sqlite import wakeups
from tidebook.log.sqlite import SqliteLog
from tidebook.log.port import Outgoing

async def main(folder, count):
    wakeups.POLL_S = 1000.0
    log = SqliteLog(folder)
    await log.create_topic("t", 2)
    at = 0
    print("ready", flush=True)
    while at < count:
        assert await log.wait("t", 0, offset=at)
        batch = await log.read("t", 0, start=at, stop=await log.end("t", 0))
        for record in batch.records:
            await log.append(Outgoing("t", 1, None, record.value))
        at = batch.next_offset
    await log.close()

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


async def start(script: str, *arguments: object) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, *map(str, arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


async def end(process: asyncio.subprocess.Process) -> None:
    await process.communicate()
    assert process.returncode == 0


async def test_two_processes_write_and_a_third_reads_all_in_order(tmp_path: Path) -> None:
    count = 300
    writers = [await start(WRITER, tmp_path, name, count) for name in ("a", "b")]
    log = SqliteLog(tmp_path)
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write(b"go\n")
    seen: dict[bytes | None, list[int]] = {}
    for partition in (0, 1):
        at = 0
        while at < 2 * 4 * count:
            assert await log.wait("t", partition, offset=at, timeout_s=60)
            batch = await log.read("t", partition, start=at, stop=await log.end("t", partition))
            assert [each.offset for each in batch.records] == list(range(at, batch.next_offset))
            for each in batch.records:
                seen.setdefault(each.key, []).append(int(each.value or b""))
            at = batch.next_offset
    for writer in writers:
        await end(writer)
    assert len(seen) == 16
    assert all(numbers == list(range(count)) for numbers in seen.values())
    for key in filter(None, seen):
        partition = int(key[-1:]) % 2
        stop = await log.end("t", partition)
        assert len(await read_all(log, "t", partition, start=0, stop=stop, key=key)) == count
    await log.close()


async def test_processes_wake_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeups, "POLL_S", 1000.0)
    count = 50
    echo = await start(ECHO, tmp_path, count)
    log = SqliteLog(tmp_path)
    # The first wait may not be registered as a listener yet, and nothing polls here: repeat until it answers.
    sent = 0
    while not await log.wait("t", 1, offset=0, timeout_s=0.05):
        sent = (await log.append(Outgoing("t", 0, None, b"first"))).offset + 1
    for n in range(sent, count):
        await log.append(Outgoing("t", 0, None, b"%d" % n))
        assert await log.wait("t", 1, offset=n, timeout_s=60)
    await end(echo)
    await log.close()


async def test_a_writer_that_shares_the_folder_with_a_busy_one_is_not_starved(tmp_path: Path) -> None:
    busy = await start(WRITER, tmp_path, "busy", 3000)
    log = SqliteLog(tmp_path)
    assert busy.stdin is not None
    busy.stdin.write(b"go\n")
    assert await log.wait("t", 0, offset=0, timeout_s=60)
    for _ in range(50):
        async with asyncio.timeout(5):
            await log.append(Outgoing("t", 0, b"mine", b"x"))
    await end(busy)
    assert len(await read_all(log, "t", 0, start=0, stop=await log.end("t", 0), key=b"mine")) == 50
    await log.close()
