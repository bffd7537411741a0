"""Streams: many followers, slow and dead clients, and a server that drains."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest

import tidebook
from tests.integration.server.running import client, free_port, served, served_by_command
from tidebook import Event, Unavailable
from tidebook.queue.port import QueueSettings
from tidebook.replication.ticks import tick
from tidebook.server import broadcast
from tidebook.testing.replicating import replicate

PATH = "/v1/journals/orders/o-1/events"


class Follower:
    """A minimal client of a stream, with far less overhead than httpx."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, url: str, path: str) -> Follower:
        where = httpx.URL(url)
        reader, writer = await asyncio.open_connection(where.host, where.port, limit=2**22)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: {where.host}\r\n\r\n".encode())
        try:
            assert b" 200 " in await reader.readline()
        except AssertionError:
            writer.close()
            raise
        return cls(reader, writer)

    async def next(self, name: str = "data") -> str:
        """Return the next field of this name."""
        while line := await self._reader.readline():
            found, _, value = line.decode().rstrip().partition(": ")
            if found == name:
                return value
        raise EOFError

    async def payload(self) -> object:
        return json.loads(await self.next())["payload"]


async def test_many_followers_get_each_event_once_and_in_order(tmp_path: Path, long_form: bool) -> None:
    followers_count, rounds = 1_000, 10 if long_form else 2
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        orders = book.journal("orders")
        await orders.append("o-1", [Event(0)])
        followers = await asyncio.gather(
            *(Follower.connect(url, f"{PATH}?follow=true") for _ in range(followers_count))
        )
        assert await asyncio.gather(*(each.payload() for each in followers)) == [0] * followers_count
        for n in range(1, rounds + 1):
            await http.post(PATH, json={"events": [{"payload": n}]})
            assert await asyncio.gather(*(each.payload() for each in followers)) == [n] * followers_count
        for each in followers:
            each.writer.close()


async def test_a_follower_that_falls_behind_reads_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "RING_EVENTS_MAX", 5)
    async with served(tmp_path / "book") as (url, book):
        orders = book.journal("orders")
        follower = await Follower.connect(url, f"{PATH}?follow=true")
        for n in range(20):
            await orders.append("o-1", [Event(n * 50 + each) for each in range(50)])
        assert [await follower.payload() for _ in range(1000)] == list(range(1000))
        follower.writer.close()


async def test_a_follower_continues_after_a_purge(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book):
        orders = book.journal("orders")
        await orders.append("o-1", [Event("a"), Event("b")])
        follower = await Follower.connect(url, f"{PATH}?follow=true&start=2")
        assert await follower.payload() == "b"
        await orders.purge("o-1")
        await orders.append("o-1", [Event("c")])
        assert await follower.payload() == "c"
        follower.writer.close()


async def test_a_follower_of_a_deleted_and_recreated_topic_gets_the_new_events(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        for n in range(3):
            await http.post(PATH, json={"events": [{"payload": n}]})
        follower = await Follower.connect(url, f"{PATH}?follow=true&start=3")
        resume = {"last-event-id": await follower.next("id")}
        follower.writer.close()
        assert (await http.delete("/v1/topics/orders")).status_code == 204
        await book.journal("orders").append("o-1", [Event("new")])
        async with http.stream("GET", f"{PATH}?follow=true", headers=resume) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    assert json.loads(line.removeprefix("data: "))["payload"] == "new"
                    break


async def test_a_client_that_does_not_read_is_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "tidebook.toml"
    file.write_text('folder = "book"\n[server]\nsend_s = 0.3\nstreams_max = 1\n')
    async with served(file) as (url, book), client(url) as http:
        big = Event("x" * 900_000)
        for _ in range(40):
            await book.journal("orders").append("o-1", [big])
        slow = await Follower.connect(url, PATH)
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        async with asyncio.timeout(20):
            # The slow client has the only slot.
            while (await http.get(PATH, params={"limit": 1})).status_code == 429:  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.05)
        slow.writer.transport.resume_reading()  # type: ignore[attr-defined]
        with pytest.raises((EOFError, ConnectionError)):
            await asyncio.wait_for(slow.next("end"), 20)
        assert (await http.get("/v1/health/live")).status_code == 200
        slow.writer.close()


async def _connect_when_free(url: str) -> Follower:
    while True:
        try:
            return await Follower.connect(url, f"{PATH}?follow=true")
        except AssertionError:  # the server has not noticed yet that the last client has disconnected
            await asyncio.sleep(0.01)


async def test_a_client_that_disconnects_frees_its_stream(tmp_path: Path) -> None:
    file = tmp_path / "tidebook.toml"
    file.write_text('folder = "book"\n[server]\nstreams_max = 1\n')
    async with served(file) as (url, _):
        for _ in range(3):
            follower = await asyncio.wait_for(_connect_when_free(url), 20)
            await follower.next("retry")
            follower.writer.transport.abort()


async def replicated(book: tidebook.Book) -> None:
    """Replicate everything, and advance the horizon past it."""
    await replicate(book.log, book.store, "orders")
    await tick(book.log, book.store, ["orders"])
    await replicate(book.log, book.store, "orders")


async def test_a_tag_is_followed_and_resumed(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book):
        orders = book.journal("orders")
        await orders.append("o-1", [Event(1, tags={"paid"}), Event(2)])
        await orders.append("o-2", [Event(3, tags={"paid"})])
        await replicated(book)
        follower = await Follower.connect(url, "/v1/tags/paid/events?follow=true")
        first = await follower.next("id")
        assert sorted([await follower.payload(), await follower.payload()]) == [1, 3]  # type: ignore[type-var]
        await orders.append("o-3", [Event(4, tags={"paid"})])
        await replicated(book)
        assert await follower.payload() == 4
        follower.writer.close()
        resumed = await Follower.connect(url, f"/v1/tags/paid/events?follow=true&after={first}")
        assert [await resumed.payload() for _ in range(2)][-1] == 4
        resumed.writer.close()


async def test_a_claim_waits_for_work(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await book.queue("mail").open()
        claiming = asyncio.create_task(http.post("/v1/queues/mail/claims", json={"wait_s": 20}))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await http.post("/v1/queues/mail/entries", json={"entries": [{"data": {"to": "x"}}]})
        [job] = (await claiming).json()["jobs"]
        assert job["data"] == {"to": "x"}
        assert time.monotonic() - began < 5
        heartbeat = await http.post("/v1/queues/mail/heartbeats", json={"leases": [job["lease"]], "lease_s": 600})
        assert heartbeat.json()["lease_until"][0] > job["lease_until"]
        assert (await http.post("/v1/queues/mail/done", json={"leases": [job["lease"]]})).status_code == 204
        await http.post("/v1/queues/mail/entries", json={"entries": [{"data": 1}, {"data": 2}]})
        [job] = (await http.post("/v1/queues/mail/claims", json={"limit": 1})).json()["jobs"]
        [last] = (await http.post("/v1/queues/mail/claims", json={"done": [job["lease"]]})).json()["jobs"]
        assert last["data"] == 2
        lost = await http.post("/v1/queues/mail/done", json={"leases": [job["lease"]]})
        assert (lost.status_code, lost.json()["type"]) == (409, "urn:tidebook:error:lease-lost")


async def test_listening_does_not_create_the_queue_and_begins_when_it_is_created(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        follower = await Follower.connect(url, "/v1/queues/mail/due")
        await follower.next("retry")
        assert (await http.get("/v1/queues")).json() == {"queues": []}
        await book.queue("mail").put(1)
        assert "due_at" in json.loads(await asyncio.wait_for(follower.next(), 20))
        follower.writer.close()


async def test_a_claim_that_finishes_a_lost_job_claims_nothing(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        queue = book.queue("mail", settings=QueueSettings(lease_ms=600_000))
        await queue.put_many([1, 2])
        [job] = (await http.post("/v1/queues/mail/claims", json={"together": False})).json()["jobs"]
        assert (await http.post("/v1/queues/mail/done", json={"leases": [job["lease"]]})).status_code == 204
        lost = await http.post("/v1/queues/mail/claims", json={"done": [job["lease"]]})
        assert (lost.status_code, lost.json()["type"]) == (409, "urn:tidebook:error:lease-lost")
        [other] = (await http.post("/v1/queues/mail/claims", json={"wait_s": 20})).json()["jobs"]
        assert (other["data"], other["timeouts"]) == (2, 0)  # the entry was not claimed before


async def test_a_claim_that_fails_does_not_hide_that_jobs_were_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        queue = book.queue("mail")
        await queue.put(1)
        [job] = (await http.post("/v1/queues/mail/claims", json={"together": False})).json()["jobs"]
        claimed = asyncio.Event()
        claim = queue.claim

        async def fail_later(*arguments: Any, **options: Any) -> Any:
            if claimed.is_set():
                raise Unavailable("the queue store does not answer")
            found = await claim(*arguments, **options)
            claimed.set()
            return found

        with monkeypatch.context() as patch:
            patch.setattr(queue, "claim", fail_later)
            body = {"done": [job["lease"]], "wait_s": 60}
            waiting = asyncio.create_task(http.post("/v1/queues/mail/claims", json=body))
            await claimed.wait()
            await queue.put(2)
            answer = await waiting
            assert (answer.status_code, answer.json()) == (200, {"jobs": []})
            assert (await http.post("/v1/queues/mail/claims", json={})).status_code == 503
        assert [each.data for each in await claim(10)] == [2]


async def test_a_claim_that_fails_at_once_has_not_finished_its_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        queue = book.queue("mail")
        await queue.put_many([1, 2])
        [job] = (await http.post("/v1/queues/mail/claims", json={"together": False})).json()["jobs"]

        def fail(*_: object) -> NoReturn:
            raise Unavailable("the claim cannot be made")

        body = {"done": [job["lease"]]}
        with monkeypatch.context() as patch:
            patch.setattr("tidebook.queue.sqlite.claims._claim", fail)
            assert (await http.post("/v1/queues/mail/claims", json=body)).status_code == 503
        [other] = (await http.post("/v1/queues/mail/claims", json=body)).json()["jobs"]
        assert (other["data"], other["timeouts"]) == (2, 0)


async def test_a_claim_returns_the_entry_that_a_finished_one_of_its_key_held(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        await http.post("/v1/queues/mail/entries", json={"entries": [{"data": 1, "key": "k"}]})
        [job] = (await http.post("/v1/queues/mail/claims", json={})).json()["jobs"]
        await http.post("/v1/queues/mail/entries", json={"entries": [{"data": 2, "key": "k"}]})
        assert (await http.post("/v1/queues/mail/claims", json={})).json()["jobs"] == []
        [after] = (await http.post("/v1/queues/mail/claims", json={"done": [job["lease"]]})).json()["jobs"]
        assert after["data"] == 2


async def test_sigterm_drains(tmp_path: Path) -> None:
    file = tmp_path / "tidebook.toml"
    file.write_text('folder = "book"\n[server]\ndrain_s = 1.0\n')
    with served_by_command("--book", str(file)) as (url, process):
        async with client(url) as http:
            assert (await http.post(PATH, json={"events": [{"payload": 1}]})).status_code == 200
            follower = await Follower.connect(url, f"{PATH}?follow=true")
            assert await follower.payload() == 1
            process.send_signal(signal.SIGTERM)
            assert await follower.next("retry") == "500"  # the stream ends with a hint
            assert await follower.next("event") == "end"
            ready = await http.get("/v1/health/ready")
            assert ready.status_code == 503
            assert ready.json()["draining"] is True
            # Requests are still served until load balancers have noticed.
            assert (await http.post(PATH, json={"events": [{"payload": 2}]})).status_code == 200
            follower.writer.close()
        assert await asyncio.to_thread(process.wait, 30) == 0
    async with tidebook.open(tmp_path / "book") as book:
        assert await book.journal("orders").pointer("o-1") == 2


async def test_a_remote_follower_that_comes_back_does_not_delay_the_end_of_a_server(tmp_path: Path) -> None:
    port = str(free_port())
    arguments = ("--port", port, "--book", str(tmp_path / "book"))
    with ExitStack() as servers:
        url, process = servers.enter_context(served_by_command(*arguments))
        async with tidebook.open(url) as remote:
            orders = remote.journal("orders")
            await orders.append("o-1", [Event(1)])
            async with aclosing(orders.tail("o-1")) as tail:  # type: ignore[type-var]
                assert (await anext(tail)).payload == 1
                following = asyncio.ensure_future(anext(tail))
                await asyncio.sleep(0)
                process.send_signal(signal.SIGTERM)
                # Otherwise it waits `shutdown_s`, which is 20 s, for the stream that the follower has opened again.
                assert await asyncio.wait_for(asyncio.to_thread(process.wait), 10) == 0
                assert process.stderr is not None
                assert process.stderr.read() == ""
                servers.enter_context(served_by_command(*arguments))
                await orders.append("o-1", [Event(2)])
                assert (await asyncio.wait_for(following, 30)).payload == 2
