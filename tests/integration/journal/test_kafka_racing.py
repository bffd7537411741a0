"""Processes that race for the same numbers on Kafka: one winner each, and never a second copy."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from pathlib import Path

import pytest

from tests.integration.journal.conftest import OpenBook
from tidebook import Conflict, Event, OutcomeUnknown, Unavailable
from tidebook.journal.journal import Journal
from tidebook.journal.outcome import Appended
from tidebook.testing.servers import Kafka

pytestmark = [pytest.mark.kafka, pytest.mark.cassandra]

RACERS = 4
IDS = ["a", "b", "c"]


@pytest.mark.timeout(240)
async def test_exactly_one_process_wins_each_number_and_the_losers_learn_where_it_stands(
    open_book: OpenBook, tmp_path: Path, kafka_bootstrap: str, cassandra_address: str, long_form: bool
) -> None:
    topic = f"race-{uuid.uuid4().hex[:8]}"
    file = tmp_path / "tidebook.toml"
    store = f"cassandra://{cassandra_address}/journal_integration"
    file.write_text(f'[log]\nurl = "kafka://{kafka_bootstrap}"\n[store]\nurl = "{store}"\n')
    async with open_book() as book:
        await book.journal(topic).facts()
        wins_wanted = 200 if long_form else 20
        racers = [
            await asyncio.create_subprocess_exec(
                sys.executable, str(Path(__file__).parent / "racer.py"),
                str(file), topic, f"racer-{n}", ",".join(IDS), str(wins_wanted),
                stdout=asyncio.subprocess.PIPE,
            )
            for n in range(RACERS)
        ]  # fmt: skip
        outputs = [await racer.communicate() for racer in racers]
        assert [racer.returncode for racer in racers] == [0] * RACERS
        told = [json.loads(line) for output, _ in outputs for line in output.splitlines()]
        won = [each for each in told if "won" in each]
        assert len(won) >= RACERS * wins_wanted
        for id in IDS:
            events = [(event.seq_nr, event.payload) async for event in book.journal(topic).read(id)]
            # Lists, not sets: a second winner of a number would be one more.
            assert sorted((each["seq_nr"], each["payload"]) for each in won if each["won"] == id) == events
            assert [number for number, _ in events] == list(range(1, len(events) + 1))
            lost = [each for each in told if each.get("lost") == id]
            assert len(lost) >= RACERS - 1  # all of them expect 0 at first
            assert all(each["found"] > each["expected"] for each in lost)


@pytest.mark.timeout(240)
async def test_a_retry_after_an_unknown_outcome_gives_the_one_result(open_book: OpenBook, tmp_path: Path) -> None:
    topic = f"retry-{uuid.uuid4().hex[:8]}"
    with Kafka(tmp_path / "kafka") as kafka:
        async with open_book(servers=kafka.address, log={"send_timeout_ms": 3000}, partitions=1) as book:
            journal = book.journal(topic)
            first = await journal.append("a", [Event(0)])
            kafka.pause()  # it takes nothing more, but what is on its way to it stays there
            try:
                with pytest.raises(OutcomeUnknown) as caught:
                    await journal.append("a", [Event(1)], expected=1)
            finally:
                kafka.resume()
            assert await book.log.wait(topic, 0, offset=first.offset + 1, timeout_s=60)  # so it was written after all
            done = await retried(journal, caught.value)
            assert (done.first, done.last, done.offset) == (2, 2, first.offset + 1)
            assert [event.payload async for event in journal.read("a")] == [0, 1]
            with pytest.raises(Conflict):  # to a fresh one the number is taken
                await journal.append("a", [Event(1)], expected=1)


async def retried(journal: Journal, unknown: OutcomeUnknown) -> Appended:
    """The same append again, until the broker has recovered."""
    for _ in range(20):
        try:
            return await journal.append("a", [Event(1)], expected=1, retry=unknown)
        except Unavailable:
            continue
        except OutcomeUnknown as error:
            unknown = error
    pytest.fail("Kafka did not recover")
