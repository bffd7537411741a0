"""Processes race for the same numbers on Kafka: each number has one winner, and no event is written twice."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.journal.conftest import OpenBook
from tidebook.core.errors import Conflict, OutcomeUnknown, Unavailable
from tidebook.core.event import Event
from tidebook.journal.journal import Journal
from tidebook.journal.outcome import Appended
from tidebook.testing.servers import Kafka

pytestmark = [pytest.mark.kafka, pytest.mark.cassandra]

RACERS = 4
IDS = ["a", "b", "c"]
CASE_TIMEOUT_S = 60


class Race:
    """Processes that append to the same journals, and all outcomes that they reported."""

    def __init__(self, file: Path, topic: str, wins_wanted: int) -> None:
        self._arguments = (str(file), topic)
        self._wins_wanted = wins_wanted
        self._news = asyncio.Event()
        self.reported: list[dict[str, Any]] = []

    async def run(self) -> None:
        """Wait until each process has won often enough."""
        await asyncio.gather(*(self._run_one(n) for n in range(RACERS)))

    async def _run_one(self, n: int) -> None:
        racer = await asyncio.create_subprocess_exec(
            sys.executable, str(Path(__file__).parent / "racer.py"),
            *self._arguments, f"racer-{n}", ",".join(IDS), str(self._wins_wanted),
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert racer.stdout is not None
        try:
            async for line in racer.stdout:
                self.reported.append(json.loads(line))
                self._news.set()
            assert await racer.wait() == 0
        finally:
            if racer.returncode is None:
                racer.kill()
                await racer.wait()

    def outcomes(self, what: str, id: str | None = None) -> list[dict[str, Any]]:
        return [each for each in self.reported if what in each and id in (None, each[what])]

    async def until(self, what: str, count: int) -> None:
        """Wait for this many more reports of a kind."""
        wanted = len(self.outcomes(what)) + count
        while len(self.outcomes(what)) < wanted:
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), CASE_TIMEOUT_S)


def write_book(folder: Path, kafka: str, cassandra: str) -> Path:
    file = folder / "tidebook.toml"
    log = f'[log]\nurl = "kafka://{kafka}"\nsend_timeout_ms = 3000\nrequest_timeout_ms = 3000\n'
    file.write_text(f'{log}[store]\nurl = "cassandra://{cassandra}/journal_integration"\n')
    return file


async def check_history(journal: Journal, race: Race) -> None:
    """Check that the journals match the reported outcomes: one winner per number, no loser, no duplicate."""
    for id in IDS:
        events = [(event.seq_nr, event.payload) async for event in journal.read(id)]
        assert [number for number, _ in events] == list(range(1, len(events) + 1))
        # These are lists, not sets, so that a second winner of a number is visible.
        won = sorted((each["seq_nr"], each["payload"]) for each in race.outcomes("won", id))
        unknown = {each["payload"] for each in race.outcomes("unknown", id)}
        assert won == [event for event in events if event[1] not in unknown]
        there = [payload for _, payload in events]
        assert len(set(there)) == len(there)
        lost = race.outcomes("lost", id)
        assert not {each["payload"] for each in lost} & set(there)
        assert len(lost) + len(unknown) >= RACERS - 1  # initially all of them expect 0
        assert all(each["found"] > each["expected"] for each in lost)


@pytest.mark.timeout(240)
async def test_exactly_one_process_wins_each_number_and_the_losers_get_the_last_one(
    open_book: OpenBook, tmp_path: Path, kafka_bootstrap: str, cassandra_address: str, long_form: bool
) -> None:
    topic = f"race-{uuid.uuid4().hex[:8]}"
    wins_wanted = 200 if long_form else 20
    async with open_book() as book:
        await book.journal(topic).create()
        race = Race(write_book(tmp_path, kafka_bootstrap, cassandra_address), topic, wins_wanted)
        await race.run()
        assert len(race.outcomes("won")) >= RACERS * wins_wanted
        assert race.outcomes("unknown") == []
        await check_history(book.journal(topic), race)


@pytest.fixture(scope="module")
def own_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """Start a broker for this module; each test leaves it running."""
    with Kafka(tmp_path_factory.mktemp("racing") / "kafka") as kafka:
        yield kafka


@pytest.mark.timeout(300)
async def test_a_broker_killed_during_the_race_assigns_no_number_twice_and_applies_each_retry_once(
    own_kafka: Kafka, open_book: OpenBook, tmp_path: Path, cassandra_address: str, long_form: bool
) -> None:
    topic = f"race-{uuid.uuid4().hex[:8]}"
    async with open_book(servers=own_kafka.address, log={"request_timeout_ms": 60_000}) as book:
        await book.journal(topic).create()
        race = Race(write_book(tmp_path, own_kafka.address, cassandra_address), topic, 100 if long_form else 30)
        running = asyncio.create_task(race.run())
        for _ in range(2):
            await race.until("won", 20)
            await asyncio.to_thread(own_kafka.kill9)
            await race.until("retries", 1)
            await asyncio.to_thread(own_kafka.start)
        await running
        assert any(each["attempts"] > 1 for each in race.outcomes("won"))  # the kills had an effect
        await check_history(book.journal(topic), race)


@pytest.mark.timeout(240)
async def test_a_retry_after_an_unknown_outcome_gives_the_one_result(own_kafka: Kafka, open_book: OpenBook) -> None:
    topic = f"retry-{uuid.uuid4().hex[:8]}"
    async with open_book(servers=own_kafka.address, log={"send_timeout_ms": 3000}, partitions=1) as book:
        journal = book.journal(topic)
        first = await journal.append("a", [Event(0)])
        own_kafka.pause()  # it processes nothing more, but keeps the requests that were already sent
        try:
            with pytest.raises(OutcomeUnknown) as caught:
                await journal.append("a", [Event(1)], expected=1)
        finally:
            own_kafka.resume()
        assert await book.log.wait(topic, 0, offset=first.offset + 1, timeout_s=60)  # the append was written after all
        done = await retried(journal, caught.value)
        assert (done.first, done.last, done.offset) == (2, 2, first.offset + 1)
        assert [event.payload async for event in journal.read("a")] == [0, 1]
        with pytest.raises(Conflict):  # for a new append the number is taken
            await journal.append("a", [Event(1)], expected=1)


async def retried(journal: Journal, unknown: OutcomeUnknown) -> Appended:
    """Retry the same append until the broker has recovered."""
    for _ in range(20):
        try:
            return await journal.append("a", [Event(1)], expected=1, retry=unknown)
        except Unavailable:
            continue
        except OutcomeUnknown as error:
            unknown = error
    pytest.fail("Kafka did not recover")
