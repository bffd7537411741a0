"""A process killed in the middle of its writes loses nothing that was acknowledged."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tidebook.log.port import read_all
from tidebook.log.sqlite import SqliteLog

SENDER = """
import asyncio, sys
from tidebook.log.sqlite import SqliteLog
from tidebook.log.port import Outgoing

async def main(folder, name):
    log = SqliteLog(folder)
    await log.create_topic("t", 3)

    async def send(writer):
        n = 0
        while True:
            partition = n % 3
            sent = await log.append(Outgoing("t", partition, b"%s-%d" % (name, writer), b"%d" % n))
            sys.stdout.write(f"{partition} {sent.offset} {writer} {n}\\n")
            sys.stdout.flush()
            n += 1

    await asyncio.gather(*(send(writer) for writer in range(16)))

asyncio.run(main(sys.argv[1], sys.argv[2].encode()))
"""


def start(folder: Path, name: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", SENDER, str(folder), name], stdout=subprocess.PIPE, text=True)


def acknowledged(sender: subprocess.Popen[str], name: str, count: int) -> dict[tuple[int, int], tuple[bytes, bytes]]:
    """Return what was acknowledged to a sender before it was killed, after `count`: key and value by place."""
    reported: dict[tuple[int, int], tuple[bytes, bytes]] = {}
    assert sender.stdout is not None
    for line in sender.stdout:
        if not line.endswith("\n"):
            break
        partition, offset, writer, n = map(int, line.split())
        reported[partition, offset] = (f"{name}-{writer}".encode(), b"%d" % n)
        if len(reported) == count:
            sender.send_signal(signal.SIGKILL)
    sender.wait()
    sender.stdout.close()
    return reported


@pytest.mark.parametrize("count", [1, 50, 777, 4000])
async def test_a_killed_process_loses_no_acknowledged_record(tmp_path: Path, count: int) -> None:
    reported: dict[tuple[int, int], tuple[bytes, bytes]] = {}
    for run_number in range(3):
        reported |= acknowledged(start(tmp_path, f"p{run_number}"), f"p{run_number}", count)
    assert len(reported) >= 3 * count
    log = SqliteLog(tmp_path)
    found: dict[tuple[int, int], tuple[bytes | None, bytes | None]] = {}
    for partition in range(3):
        end = await log.end("t", partition)
        records = await read_all(log, "t", partition, start=0, stop=end)
        assert [each.offset for each in records] == list(range(end))
        times = [each.timestamp_ms for each in records]
        assert times == sorted(times)
        found |= {(partition, each.offset): (each.key, each.value) for each in records}
        for key in {each.key for each in records}:
            by_key = await read_all(log, "t", partition, start=0, stop=end, key=key)
            assert by_key == [each for each in records if each.key == key]
    assert {place: found.get(place) for place in reported} == reported
    assert log._database.damage() == []
    await log.close()


async def test_one_of_two_processes_is_killed_and_the_other_goes_on(tmp_path: Path) -> None:
    dying, living = start(tmp_path, "dying"), start(tmp_path, "living")
    reported = acknowledged(dying, "dying", 200)
    reported |= acknowledged(living, "living", 2000)
    log = SqliteLog(tmp_path)
    found: dict[tuple[int, int], tuple[bytes | None, bytes | None]] = {}
    for partition in range(3):
        records = await read_all(log, "t", partition, start=0, stop=await log.end("t", partition))
        found |= {(partition, each.offset): (each.key, each.value) for each in records}
    assert {place: found.get(place) for place in reported} == reported
    await log.close()
