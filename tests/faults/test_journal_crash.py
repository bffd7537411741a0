"""A process killed in the middle of 64 writers' appends: no acknowledged append is lost, doubled or out of order."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tidebook
from tidebook.testing.replicating import replicate

TOPIC = "orders"

WRITER = """
import asyncio, sys
import tidebook

async def main(folder, run_number, replicating):
    async with tidebook.open(folder) as book:
        orders = book.journal("orders")

        async def write(writer):
            id, n = f"j{writer % 16}", 0
            while True:
                done = await orders.append(id, [tidebook.Event([run_number, writer, n])])
                sys.stdout.write(f"{id} {done.first} {run_number} {writer} {n}\\n")
                sys.stdout.flush()
                n += 1

        async def copy():
            from tidebook.testing.replicating import replicate
            await orders.create()
            while replicating:
                await replicate(book.log, book.store, "orders", batch_records=50, batches_max=1)
                await asyncio.sleep(0.001)

        await asyncio.gather(copy(), *(write(writer) for writer in range(64)))

asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"))
"""

Reported = dict[tuple[str, int], list[int]]


def killed_after(folder: Path, run_number: int, count: int, *, replicating: bool) -> Reported:
    """Run a process until `count` appends were acknowledged, kill it, and return all acknowledgements."""
    command = [sys.executable, "-c", WRITER, str(folder), str(run_number), str(replicating)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    reported: Reported = {}
    assert process.stdout is not None
    for line in process.stdout:
        if not line.endswith("\n"):
            break  # cut off by the kill
        id, number, *payload = line.split()
        reported[id, int(number)] = [int(part) for part in payload]
        if len(reported) == count:
            process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    return reported


@pytest.mark.parametrize("replicating", [False, True], ids=["log only", "replicating"])
async def test_no_acknowledged_append_is_lost_by_a_kill(tmp_path: Path, replicating: bool, long_form: bool) -> None:
    reported: Reported = {}
    for run_number in range(20 if long_form else 4):
        new = killed_after(tmp_path, run_number, 100 + 400 * (run_number % 3), replicating=replicating)
        assert not reported.keys() & new.keys(), "a number was given twice"
        reported |= new
    async with tidebook.open(tmp_path) as book:
        orders = book.journal(TOPIC)
        for _ in range(2):
            found: dict[tuple[str, int], list[int]] = {}
            for id in [id async for id in orders.ids()]:
                events = [event async for event in orders.read(id)]
                assert [event.seq_nr for event in events] == list(range(1, len(events) + 1))
                found |= {(id, event.seq_nr): event.payload for event in events}
                assert len({tuple(event.payload) for event in events}) == len(events), "an event is there twice"
            assert {place: found.get(place) for place in reported} == reported
            await replicate(book.log, book.store, TOPIC, batch_records=333)  # then once more, from the store
