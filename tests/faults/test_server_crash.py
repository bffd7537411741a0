"""After kill -9 of a server under load, its journals have each acknowledged event once, in order, and no others."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

import tidebook
from tests.integration.server.running import client, served_by_command

WRITERS = 8


class Writer:
    """Appends numbered events to its own journal, and repeats an unanswered append with the same key."""

    def __init__(self, topic: str, name: str) -> None:
        self.topic = topic
        self.name = name
        self.acknowledged: list[int] = []
        self.next = 0
        #: Set once the running server has acknowledged an append.
        self.answered = asyncio.Event()

    async def write(self, http: httpx.AsyncClient) -> None:
        """Append until the server fails."""
        while True:
            body = {"events": [{"payload": self.next}]}
            headers = {"idempotency-key": f"{self.name}-{self.next}"}
            try:
                answer = await http.post(f"/v1/journals/{self.topic}/{self.name}/events", json=body, headers=headers)
            except httpx.TransportError:
                return  # the outcome is unknown: the next server gets the same request
            assert answer.status_code == 200, answer.text
            assert answer.json()["first"] == self.next + 1
            self.acknowledged.append(self.next)
            self.next += 1
            self.answered.set()


@pytest.mark.timeout(300)
async def test_no_acknowledged_append_is_lost_or_doubled(tmp_path: Path, long_form: bool) -> None:
    await _kill_and_check(tmp_path / "book", rounds=10 if long_form else 2)


@pytest.mark.kafka
@pytest.mark.cassandra
@pytest.mark.postgres
@pytest.mark.timeout(300)
async def test_no_acknowledged_append_is_lost_or_doubled_on_servers(
    tmp_path: Path, kafka_bootstrap: str, cassandra_address: str, postgres_url: str
) -> None:
    file = tmp_path / "tidebook.toml"
    file.write_text(
        f'folder = "{tmp_path / "book"}"\n[log]\nurl = "kafka://{kafka_bootstrap}"\n'
        f'[store]\nurl = "cassandra://{cassandra_address}/server_crash"\n[sql]\nurl = "{postgres_url}"\n'
    )
    await _kill_and_check(file, rounds=2)


async def _kill_and_check(where: Path, rounds: int) -> None:
    """Kill a server during writes, several times, and compare the journals with the acknowledged appends."""
    pauses = random.Random(7)
    topic = f"orders-{uuid4().hex[:8]}"
    writers = [Writer(topic, f"w-{n}") for n in range(WRITERS)]
    for _ in range(rounds):
        with served_by_command("--book", str(where)) as (url, process):
            async with client(url) as http:
                for writer in writers:
                    writer.answered.clear()
                writing = [asyncio.create_task(writer.write(http)) for writer in writers]
                await asyncio.gather(*(writer.answered.wait() for writer in writers))
                await asyncio.sleep(pauses.random())
                process.kill()
                await asyncio.gather(*writing)
    async with tidebook.open(where) as book:
        for writer in writers:
            found = [event.payload async for event in book.journal(topic).read(writer.name)]
            assert found[: len(writer.acknowledged)] == writer.acknowledged
            # The last append may have happened without an answer.
            assert found == list(range(len(found)))
            assert len(found) - len(writer.acknowledged) in (0, 1)
