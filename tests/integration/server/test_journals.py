"""Journals over HTTP: append, read, follow, delete, purge, snapshots, ids."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

import tidebook
from tests.integration.server.running import client, lines, served, served_book
from tidebook import Event
from tidebook.core.errors import NotFound
from tidebook.testing.replicating import replicate


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        yield http


async def test_payloads_are_returned_with_the_type_that_was_appended(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        events: list[dict[str, Any]] = [
            {"payload": {"total": 3}, "tags": ["paid"], "metadata": {"by": "x"}},
            {"payload": "text"},
            {"payload_base64": "AAH/"},
            {"payload": None},
        ]
        done = await http.post("/v1/journals/orders/o-1/events", json={"events": events})
        assert done.status_code == 200
        assert (done.json()["first"], done.json()["last"]) == (1, 4)
        found = [event async for event in book.journal("orders").read("o-1")]
        assert [event.payload for event in found] == [{"total": 3}, "text", b"\x00\x01\xff", None]
        assert found[0].tags == {"paid"}
        assert found[0].metadata == {"by": "x"}
        read = lines(await http.get("/v1/journals/orders/o-1/events"))
        assert read[-1] == {"end": True}
        rest = {"seq_nr", "timestamp_ms", "partition", "offset"}
        for line, event in zip(read[:-1], events, strict=True):
            assert {name: line[name] for name in line.keys() - rest} == {
                "tags": [], "metadata": None, "type": None, "version": 1, **event,
            }  # fmt: skip


@pytest.mark.parametrize("id", ["a/b", "ä ö", "x%2Fy", "?#&=", "..x", "a" * 900])
async def test_any_id_is_a_path_segment(http: httpx.AsyncClient, id: str) -> None:
    url = f"/v1/journals/orders/{quote(id, safe='')}"
    assert (await http.post(f"{url}/events", json={"events": [{"payload": 1}]})).status_code == 200
    assert (await http.get(url)).json() == {"seq_nr": 1}
    assert {"id": id} in lines(await http.get("/v1/journals/orders"))


async def test_an_expected_number_that_is_not_met_is_a_conflict(http: httpx.AsyncClient) -> None:
    url = "/v1/journals/orders/o-1/events"
    assert (await http.post(url, json={"events": [{"payload": 1}], "expected": 0})).status_code == 200
    refused = await http.post(url, json={"events": [{"payload": 1}], "expected": 0})
    assert refused.status_code == 409
    assert refused.headers["content-type"] == "application/problem+json"
    problem = refused.json()
    assert problem["type"] == "urn:tidebook:error:conflict"
    assert (problem["expected"], problem["found"]) == (0, 1)
    assert problem["key"] == {"topic": "orders", "id": "o-1"}


async def test_a_page_reports_where_the_next_one_starts(http: httpx.AsyncClient) -> None:
    url = "/v1/journals/orders/o-1/events"
    await http.post(url, json={"events": [{"payload": n} for n in range(10)]})
    first = lines(await http.get(url, params={"limit": 4}))
    assert [line.get("payload") for line in first] == [0, 1, 2, 3, None]
    assert first[-1] == {"next": 5}
    rest = lines(await http.get(url, params={"start": 5, "limit": 6}))
    assert rest[-1] == {"end": True}
    assert len(rest) == 7


async def test_a_batch_has_a_result_for_each_append(http: httpx.AsyncClient) -> None:
    body = {
        "appends": [
            {"id": "a", "events": [{"payload": 1}]},
            {"id": "a", "events": [{"payload": 2}], "expected": 7},
            {"id": "b", "events": [{"payload": 3}, {"payload": 4}]},
        ]
    }
    results = (await http.post("/v1/journals/orders", json=body)).json()["results"]
    assert (results[0]["first"], results[2]["first"], results[2]["last"]) == (1, 1, 2)
    assert results[1]["problem"]["type"] == "urn:tidebook:error:conflict"


async def test_appends_of_a_batch_to_the_same_journal_are_numbered_in_order(http: httpx.AsyncClient) -> None:
    body = {"appends": [{"id": f"j{n % 7}", "events": [{"payload": n}]} for n in range(100)]}
    results = (await http.post("/v1/journals/orders", json=body)).json()["results"]
    assert [each["first"] for each in results] == [n // 7 + 1 for n in range(100)]


async def test_a_follower_gets_old_and_new_events_and_resumes_by_event_id(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        orders = book.journal("orders")
        await orders.append("o-1", [Event(1), Event(2)])
        path = "/v1/journals/orders/o-1/events"
        async with http.stream("GET", path, params={"follow": True}) as stream:
            assert stream.headers["content-type"] == "text/event-stream"
            data = _data(stream.aiter_lines())
            assert [await anext(data) for _ in range(2)] == [("1", 1), ("2", 2)]
            await orders.append("o-1", [Event(3)])
            assert await anext(data) == ("3", 3)
        async with http.stream("GET", path, params={"follow": True}, headers={"last-event-id": "2"}) as stream:
            assert await anext(_data(stream.aiter_lines())) == ("3", 3)


async def _data(received: AsyncIterator[str]) -> AsyncIterator[tuple[str, object]]:
    id = ""
    async for line in received:
        name, _, value = line.partition(": ")
        if name == "id":
            id = value
        elif name == "data":
            yield id.partition("-")[0], json.loads(value)["payload"]


async def test_delete_purge_and_pointer(http: httpx.AsyncClient) -> None:
    url = "/v1/journals/orders/o-1"
    assert (await http.get(url)).status_code == 404
    await http.post(f"{url}/events", json={"events": [{"payload": n} for n in range(5)]})
    assert (await http.delete(f"{url}/events", params={"to": 3})).status_code == 204
    assert [line.get("seq_nr") for line in lines(await http.get(f"{url}/events"))] == [4, 5, None]
    assert (await http.delete(url)).status_code == 204
    assert (await http.get(url)).status_code == 404
    assert lines(await http.get(f"{url}/events")) == [{"end": True}]


async def test_snapshots(http: httpx.AsyncClient) -> None:
    url = "/v1/journals/orders/o-1"
    await http.post(f"{url}/events", json={"events": [{"payload": n} for n in range(5)]})
    assert (await http.get(f"{url}/snapshot")).status_code == 404
    assert (await http.put(f"{url}/snapshots/3", json={"payload_base64": "AAE="})).status_code == 204
    assert (await http.put(f"{url}/snapshots/5", json={"payload": {"n": 5}})).status_code == 204
    assert (await http.get(f"{url}/snapshot")).json()["payload"] == {"n": 5}
    assert (await http.get(f"{url}/snapshot", params={"to": 4})).json()["payload_base64"] == "AAE="
    assert (await http.delete(f"{url}/snapshots", params={"to": 4})).status_code == 204
    assert (await http.get(f"{url}/snapshot", params={"to": 4})).status_code == 404
    assert (await http.put(f"{url}/snapshots/9", json={"payload": 1})).status_code == 400


async def test_ids_are_listed_by_prefix(http: httpx.AsyncClient) -> None:
    for id in ("a-1", "a-2", "b-1"):
        await http.post(f"/v1/journals/orders/{id}/events", json={"events": [{"payload": 1}]})
    found = lines(await http.get("/v1/journals/orders", params={"prefix": "a-"}))
    assert sorted(line["id"] for line in found[:-1]) == ["a-1", "a-2"]
    assert lines(await http.get("/v1/journals/none")) == [{"end": True}]


async def test_a_topic_is_created_once(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        missing = await http.get("/v1/topics/orders/config")
        assert (missing.status_code, await book.topics()) == (404, [])  # reading creates nothing
        created = await http.put("/v1/topics/orders")
        assert (created.status_code, await book.topics()) == (200, ["orders"])
        await book.journal("orders").append("o-1", [Event(1)])
        assert (await http.put("/v1/topics/orders")).json() == created.json()
        assert (await http.get("/v1/topics/orders/config")).json() == created.json()
        assert await book.journal("orders").pointer("o-1") == 1
        refused = await http.put("/v1/topics/tidebook-audit")
        assert refused.status_code == 403
        unnamed = await http.put("/v1/topics/a%20b")
        assert (unnamed.status_code, unnamed.json()["type"]) == (400, "urn:tidebook:error:invalid-input")


async def test_a_remote_book_creates_a_topic(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), tidebook.open(url) as remote:
        with pytest.raises(NotFound):
            await remote.journal("orders").topic_config()
        created = await remote.journal("orders").create()
        assert created == await remote.journal("orders").topic_config() == await book.journal("orders").topic_config()


@pytest.mark.parametrize("name", [".", ".."])
async def test_a_remote_book_accepts_dots_as_names(tmp_path: Path, name: str) -> None:
    async with served(tmp_path / "book") as (url, book), tidebook.open(url) as remote:
        assert (await remote.journal("orders").append(name, [Event(1, tags={name})])).first == 1
        assert [event.payload async for event in remote.journal("orders").read(name)] == [1]
        assert await book.journal("orders").pointer(name) == 1
        assert [event async for event in remote.tags.read(name)] == []
        region = await remote.wal(name).open_region(7, create=True)
        assert (await region.write(1, [b"x"])).first == 1
        assert await book.wal(name).regions() == [7]


async def test_an_invalid_append_of_a_batch_does_not_hide_the_others(http: httpx.AsyncClient) -> None:
    """Appends with an option are applied in groups: before the last one is found invalid, others have happened."""
    appends = [{"id": f"o-{n}", "expected": 0, "events": [{"payload": n}]} for n in range(300)]
    appends[-1]["events"] = [{}]
    answer = await http.post("/v1/journals/orders", json={"appends": appends})
    assert answer.status_code == 200
    *others, last = answer.json()["results"]
    assert [each["first"] for each in others] == [1] * 299
    assert last["problem"]["type"] == "urn:tidebook:error:invalid-input"


async def _ids_and_payloads(http: httpx.AsyncClient, after: str | None, count: int) -> list[tuple[str, object]]:
    """Follow journal o-1 from the event after an id; return the ids and payloads of this many events."""
    headers = {} if after is None else {"last-event-id": after}
    found: list[tuple[str, object]] = []
    async with http.stream("GET", "/v1/journals/orders/o-1/events?follow=true", headers=headers) as stream:
        assert stream.status_code == 200, await stream.aread()
        id = ""
        async for line in stream.aiter_lines():
            name, _, value = line.partition(": ")
            id = value if name == "id" else id
            if name == "data":
                found.append((id, json.loads(value)["payload"]))
            if len(found) == count:
                break
    return found


@pytest.mark.parametrize("regrown", [1, 2, 3, 5])
async def test_a_follower_that_reconnects_gets_all_of_the_next_incarnation(tmp_path: Path, regrown: int) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        orders = book.journal("orders")
        await orders.append("o-1", [Event(n) for n in range(3)])
        id, _ = (await _ids_and_payloads(http, None, 3))[-1]
        await orders.purge("o-1")
        await orders.append("o-1", [Event(f"new {n}") for n in range(regrown)])
        found = await asyncio.wait_for(_ids_and_payloads(http, id, regrown), 30)
        assert [payload for _, payload in found] == [f"new {n}" for n in range(regrown)]
        await orders.append("o-1", [Event("last")])
        assert [each for _, each in await asyncio.wait_for(_ids_and_payloads(http, found[-1][0], 1), 30)] == ["last"]


@pytest.mark.parametrize("others", [0, 1, 9])
@pytest.mark.parametrize("is_there", [True, False])
async def test_a_follower_that_reconnects_gets_all_events_of_a_topic_that_was_created_again(
    tmp_path: Path, others: int, is_there: bool
) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        orders = book.journal("orders")
        await orders.append("o-1", [Event(n) for n in range(3)])
        await orders.append("o-1", [Event(3)])
        id, _ = (await _ids_and_payloads(http, None, 4))[-1]
        await book.delete_topic("orders")
        orders = book.journal("orders")
        for _ in range(others):  # with offsets up to that of the event, and above
            await orders.append("o-1" if is_there else "o-2", [Event("new")])
        following = asyncio.create_task(_ids_and_payloads(http, id, 10))
        for _ in range(10 - others if is_there else 10):
            await orders.append("o-1", [Event("new")])
        found = await asyncio.wait_for(following, 30)
        assert [payload for _, payload in found] == ["new"] * 10


async def test_a_follower_gets_the_events_of_an_adopted_log(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path / "book", create=True) as book:
        for n in range(5):
            await book.journal("orders").append("o-1", [Event(n)])
        await replicate(book.log, book.store, "orders")
        async with served_book(book) as url, client(url) as http:
            ids = [id for id, _ in await _ids_and_payloads(http, None, 5)]
        await book.log.delete_topic("orders")
    async with tidebook.open(tmp_path / "book") as book, served_book(book) as url, client(url) as http:
        await book.journal("orders").adopt()
        for n in range(5, 8):  # with the offsets of earlier events
            await book.journal("orders").append("o-1", [Event(n)])
        for known in (None, *ids):
            first = 0 if known is None else ids.index(known) + 1
            found = await asyncio.wait_for(_ids_and_payloads(http, known, 8 - first), 30)
            assert [payload for _, payload in found] == list(range(first, 8))


async def test_an_id_of_another_stream_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await book.journal("orders").append("o-1", [Event(1)])
        await book.journal("orders").append("o-2", [Event(1)])
        [(id, _)] = await _ids_and_payloads(http, None, 1)
        for wrong in (
            id,
            "1-2",
            "1-x-0",
            "-1",
            "x",
            "1-2-3-4",
            "1-1.2-3-4",
            "9007199254740991",
            "99999999999999999999",
        ):
            refused = await http.get("/v1/journals/orders/o-2/events?follow=true", headers={"last-event-id": wrong})
            assert (refused.status_code, refused.json()["type"]) == (400, "urn:tidebook:error:invalid-input"), wrong
        tagged = await http.get("/v1/tags/paid/events?follow=true", headers={"last-event-id": id})
        assert tagged.status_code == 400


async def test_a_remote_tail_gets_all_of_the_next_incarnation_after_a_restart(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path / "book", create=True) as book, AsyncExitStack() as stack:
        orders = book.journal("orders")
        await orders.append("o-1", [Event(n) for n in range(3)])
        async with served_book(book) as url:
            remote = await stack.enter_async_context(tidebook.open(url))
            tail = await stack.enter_async_context(aclosing(remote.journal("orders").tail("o-1")))  # type: ignore[type-var]
            assert [(await anext(tail)).payload for _ in range(3)] == [0, 1, 2]
        await orders.purge("o-1")
        await orders.append("o-1", [Event(f"new {n}") for n in range(5)])
        async with served_book(book, port=httpx.URL(url).port):
            async with asyncio.timeout(60):
                assert [(await anext(tail)).payload for _ in range(5)] == [f"new {n}" for n in range(5)]
