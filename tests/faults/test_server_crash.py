"""kill -9 of a server under load: what was acknowledged is there once, in order, and nothing else is."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx
import pytest

import tidebook
from tests.integration.server.running import client, served_by_command

WRITERS = 8


class Writer:
    """Appends numbered events to its own journal, and repeats what was not answered with the same key."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.acknowledged: list[int] = []
        self.next = 0

    async def write(self, http: httpx.AsyncClient) -> None:
        """Append until the server is gone."""
        while True:
            body = {"events": [{"payload": self.next}]}
            headers = {"idempotency-key": f"{self.name}-{self.next}"}
            try:
                answer = await http.post(f"/v1/journals/orders/{self.name}/events", json=body, headers=headers)
            except httpx.TransportError:
                return  # unknown: the next server is asked the same again
            assert answer.status_code == 200, answer.text
            assert answer.json()["first"] == self.next + 1
            self.acknowledged.append(self.next)
            self.next += 1


@pytest.mark.timeout(300)
async def test_no_acknowledged_append_is_lost_or_doubled(tmp_path: Path, long_form: bool) -> None:
    rounds, seed = (10, 7) if long_form else (2, 7)
    pauses = random.Random(seed)
    writers = [Writer(f"w-{n}") for n in range(WRITERS)]
    for _ in range(rounds):
        with served_by_command("--book", str(tmp_path / "book")) as (url, process):
            async with client(url) as http:
                writing = [asyncio.create_task(writer.write(http)) for writer in writers]
                await asyncio.sleep(0.3 + pauses.random())
                process.kill()
                await asyncio.gather(*writing)
    assert all(writer.acknowledged for writer in writers)
    async with tidebook.open(tmp_path / "book") as book:
        for writer in writers:
            found = [event.payload async for event in book.journal("orders").read(writer.name)]
            assert found[: len(writer.acknowledged)] == writer.acknowledged
            # The last append may have happened without an answer.
            assert found == list(range(len(found)))
            assert len(found) - len(writer.acknowledged) in (0, 1)
