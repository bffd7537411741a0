"""A repeated request with the same Idempotency-Key gets the same response and changes nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import apsw
import pytest

import tidebook
from tests.integration.server.conftest import CreateToken
from tests.integration.server.examples import EXAMPLES, prepare, request_of
from tests.integration.server.running import client, served
from tidebook import Event
from tidebook.api.routes import BY_NAME
from tidebook.core.errors import OutcomeUnknown
from tidebook.runtime.clock import SystemClock
from tidebook.server.database import ServerDatabase
from tidebook.server.idempotency import EncodedResponse, IdempotencyKeys

KEY = {"idempotency-key": "k-1"}


async def test_an_append_is_applied_once(tmp_path: Path) -> None:
    path, body = "/v1/journals/orders/o-1/events", {"events": [{"payload": 1}]}
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        first = await http.post(path, json=body, headers=KEY)
    async with served(tmp_path / "book") as (url, book), client(url) as http:  # after a restart
        again = await http.post(path, json=body, headers=KEY)
        assert again.json() == first.json()
        other = await http.post(path, json=body, headers={"idempotency-key": "k-2"})
        assert other.json()["first"] == 2
        assert await book.journal("orders").pointer("o-1") == 2


async def test_an_append_is_applied_once_even_after_many_others_and_a_restart(tmp_path: Path) -> None:
    path, body = "/v1/journals/orders/o-1/events", {"events": [{"payload": 1}]}
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        first = await http.post(path, json=body, headers=KEY)
        for n in range(20):  # a journal remembers 16 append ids
            await book.journal("orders").append("o-1", [Event(n)])
        again = await http.post(path, json=body, headers=KEY)
        assert (again.json(), again.headers["idempotency-replayed"]) == (first.json(), "true")
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        assert (await http.post(path, json=body, headers=KEY)).json() == first.json()
        other = await http.post(path, json={"events": [{"payload": 2}]}, headers=KEY)
        assert (other.status_code, "different request" in other.json()["detail"]) == (400, True)
        assert await book.journal("orders").pointer("o-1") == 21


async def test_a_batch_that_failed_in_part_may_be_repeated(tmp_path: Path) -> None:
    events = [{"payload": 1}]
    body = {"appends": [{"id": "a", "events": events}, {"id": "b", "events": events, "expected": 1}]}
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        first = await http.post("/v1/journals/orders", json=body, headers=KEY)
        assert first.json()["results"][1]["problem"]["status"] == 409
        await book.journal("orders").append("b", [Event(0)])
        again = await http.post("/v1/journals/orders", json=body, headers=KEY)
        assert [each["first"] for each in again.json()["results"]] == [1, 2]


async def test_a_key_of_an_append_of_other_events_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        headers = {"idempotency-key": "k-1"}
        path = "/v1/journals/orders/o-1/events"
        assert (await http.post(path, json={"events": [{"payload": 1}]}, headers=headers)).status_code == 200
        for elsewhere, payload in ((path, 2), (path.replace("o-1", "o-2"), 1)):
            other = await http.post(elsewhere, json={"events": [{"payload": payload}]}, headers=headers)
            assert other.status_code == 400
            assert "different request" in other.json()["detail"]
        same = await http.post(path, json={"events": [{"payload": 1}]}, headers=headers)
        assert same.json()["first"] == 1


async def test_a_batch_is_applied_once(tmp_path: Path) -> None:
    body = {"appends": [{"id": id, "events": [{"payload": 1}]} for id in ("a", "b", "a")]}
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        first = await http.post("/v1/journals/orders", json=body, headers=KEY)
        assert [each["first"] for each in first.json()["results"]] == [1, 1, 2]
        assert (await http.post("/v1/journals/orders", json=body, headers=KEY)).json() == first.json()


async def test_a_put_is_applied_once_even_after_a_restart(tmp_path: Path) -> None:
    path, body = "/v1/queues/mail/entries", {"entries": [{"data": 1}]}
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        first = await http.post(path, json=body, headers=KEY)
        assert "idempotency-replayed" not in first.headers
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        again = await http.post(path, json=body, headers=KEY)
        assert again.json() == first.json()
        assert again.headers["idempotency-replayed"] == "true"
        assert (await book.queue("mail").status()).due == 1


#: These start child processes with Spark, and end them.
JOBS = ("pipeline.start", "pipeline.cancel")
#: What workers report about themselves is not audited.
WORKERS = ("queues.report_worker", "queues.remove_worker")


async def test_every_change_happens_and_is_audited_once_for_its_key(tmp_path: Path, create_token: CreateToken) -> None:
    token, changed = (await create_token("admin")).token, Counter[str]()
    async with served(tmp_path / "book") as (url, book), client(url, token) as http:
        known = {**await prepare(book), "token": token}
        for name in EXAMPLES:
            route = BY_NAME[name]
            if not route.mutates or name in JOBS:
                continue
            keyed = {"idempotency-key": f"key-of-{name}"}
            first, second = [await http.send(request_of(http, route, known, headers=keyed)) for _ in range(2)]
            if route.returns_secret:
                assert (first.status_code, second.status_code) == (400, 400)
                first = await http.send(request_of(http, route, known))
            else:
                assert second.headers["idempotency-replayed"] == "true", name
                assert (first.status_code, first.content) == (second.status_code, second.content)
            assert first.status_code == route.status, (name, first.text)
            changed[name] += name not in WORKERS
            known |= {"session": first.json()["session"]} if name == "wal.open_session" else {}
            known |= {"new_token": first.json()["id"]} if name == "access.create_token" else {}
    async with tidebook.open(tmp_path / "book") as book:
        audit = book.journal("tidebook-audit")
        audited = [event.payload["action"] async for id in audit.ids() async for event in audit.read(id)]
    assert Counter(audited) == changed + Counter(["server.start", "server.stop"])


async def test_concurrent_repeats_put_once(tmp_path: Path) -> None:
    path, body = "/v1/queues/mail/entries", {"entries": [{"data": 1}]}
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        answers = await asyncio.gather(*(http.post(path, json=body, headers=KEY) for _ in range(20)))
        assert {each.status_code for each in answers} == {200}
        assert (await book.queue("mail").status()).due == 1


async def test_a_key_of_another_request_is_refused(tmp_path: Path) -> None:
    path = "/v1/queues/mail/entries"
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        await http.post(path, json={"entries": [{"data": 1}]}, headers=KEY)
        refused = await http.post(path, json={"entries": [{"data": 2}]}, headers=KEY)
        assert (refused.status_code, refused.json()["type"]) == (400, "urn:tidebook:error:invalid-input")


async def test_a_refused_request_may_be_repeated(tmp_path: Path) -> None:
    path = "/v1/queues/mail/dead-letters/1/retry"
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        assert (await http.post(path, headers=KEY)).status_code == 404
        assert (await http.post(path, headers=KEY)).status_code == 404


async def test_concurrent_repeats_of_a_refused_request_are_all_refused_alike(tmp_path: Path) -> None:
    path = "/v1/queues/mail/dead-letters/1/retry"
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        answers = await asyncio.gather(*(http.post(path, headers=KEY) for _ in range(10)))
        assert {each.status_code for each in answers} == {404}


async def test_keys_of_two_tokens_are_independent(tmp_path: Path, create_token: CreateToken) -> None:
    tokens = [(await create_token("operator")).token for _ in range(2)]
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        for path, body in (
            ("/v1/journals/orders/o-1/events", {"events": [{"payload": 1}]}),
            ("/v1/queues/mail/entries", {"entries": [{"data": 1}]}),
        ):
            for token in tokens:
                headers = {**KEY, "authorization": f"Bearer {token}"}
                answer = await http.post(path, json=body, headers=headers)
                assert (answer.status_code, "idempotency-replayed" in answer.headers) == (200, False)
        assert await book.journal("orders").pointer("o-1") == 2
        assert (await book.queue("mail").status()).due == 2


async def test_concurrent_appends_with_one_key_happen_once(tmp_path: Path) -> None:
    path, body = "/v1/journals/orders/o-1/events", {"events": [{"payload": 1}]}
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        answers = await asyncio.gather(*(http.post(path, json=body, headers=KEY) for _ in range(20)))
        assert [each.json()["first"] for each in answers] == [1] * 20
        assert await book.journal("orders").pointer("o-1") == 1


async def test_two_servers_of_a_book_run_a_request_once(tmp_path: Path) -> None:
    databases = [ServerDatabase(tmp_path) for _ in range(2)]
    one, other = (IdempotencyKeys(each, SystemClock(), keys_max=100, keep_s=60) for each in databases)
    runs: list[int] = []
    go_on = asyncio.Event()

    async def run() -> EncodedResponse:
        runs.append(len(runs))
        await go_on.wait()
        return EncodedResponse(200, b"{}")

    # Both look for the key before either stores it.
    calls = [asyncio.ensure_future(each.run_once("ann", "k-1", b"put", run)) for each in (one, other)]
    ended, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    assert [type(each.exception()) for each in ended] == [OutcomeUnknown]
    go_on.set()
    await asyncio.wait(calls)
    assert len(runs) == 1
    for each in (one, other):
        assert (await each.run_once("ann", "k-1", b"put", run)).replayed
    for database in databases:
        await database.close()


async def test_an_interrupted_request_is_never_run_again(tmp_path: Path) -> None:
    path, body = "/v1/queues/mail/entries", {"entries": [{"data": 1}]}
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        await http.post(path, json=body, headers=KEY)
    database = ServerDatabase(tmp_path / "book")

    def interrupt(connection: apsw.Connection) -> None:
        connection.execute("UPDATE answered SET status = NULL, body = NULL")

    await database.change(interrupt)
    await database.close()
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        again = await http.post(path, json=body, headers=KEY)
        assert (again.status_code, again.json()["type"]) == (504, "urn:tidebook:error:outcome-unknown")
        assert (await book.queue("mail").status()).due == 1


@pytest.mark.parametrize("key", ["", "x" * 201, "a b", "\xe4"])
async def test_a_malformed_key_is_refused(tmp_path: Path, key: str) -> None:
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        for path, body in (
            ("/v1/journals/orders/o-1/events", {"events": [{"payload": 1}]}),
            ("/v1/queues/mail/entries", {"entries": [{"data": 1}]}),
        ):
            headers = {"idempotency-key": key.encode("latin-1")}
            assert (await http.post(path, json=body, headers=headers)).status_code == 400  # type: ignore[arg-type]
