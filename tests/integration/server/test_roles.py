"""Every route refuses requests without a token, and with a weak, foreign or expired one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.server.conftest import CreateToken
from tests.integration.server.examples import prepare, request_of
from tests.integration.server.running import client, lines, served
from tidebook import Event
from tidebook.api.access import Role
from tidebook.api.routes import ROUTES
from tidebook.replication.ticks import tick
from tidebook.runtime.clock import SystemClock
from tidebook.server.database import ServerDatabase
from tidebook.server.tokens import Tokens
from tidebook.testing.replicating import replicate


async def test_every_route_declares_a_role_and_keeps_to_it(tmp_path: Path, create_token: CreateToken) -> None:
    tokens = {role: (await create_token(role)).token for role in ("viewer", "operator", "admin")}
    foreign = (await create_token("admin", prefix="other-")).token
    expired = (await create_token("admin", expire_after_s=0.001)).token
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        known = {**await prepare(book), "token": tokens["admin"]}

        async def status_with(route: object, token: str | None) -> tuple[int, str]:
            headers = {} if token is None else {"authorization": f"Bearer {token}"}
            response = await http.send(request_of(http, route, known, headers=headers), stream=True)  # type: ignore[arg-type]
            try:
                problem = await response.aread() if response.status_code >= 400 else b""
                return response.status_code, problem.decode()
            finally:
                await response.aclose()

        refused = 0
        for route in ROUTES:
            if route.role is Role.PUBLIC:
                continue
            for token in (None, "tb_wrong", expired):
                status, text = await status_with(route, token)
                assert status == 401, (route.name, token)
                assert "sign-in-required" in text
            if route.scope in ("topic", "queue", "namespace", "book"):
                status, text = await status_with(route, foreign)
                assert status == 403, (route.name, text)
            for role in (Role.VIEWER, Role.OPERATOR):
                if role < route.role:
                    status, text = await status_with(route, tokens[role.label])
                    assert status == 403, (route.name, role, text)
                    assert f'"required":"{route.role.label}"' in text
                    refused += 1
        assert refused > 30
        assert [event.payload for event in [e async for e in book.journal("orders").read("o-1")]][1] == b"\0"


async def test_the_items_of_other_prefixes_are_left_out(tmp_path: Path, create_token: CreateToken) -> None:
    token = (await create_token("viewer", prefix="other")).token
    async with served(tmp_path / "book") as (url, book), client(url, token) as http:
        await prepare(book)
        await book.queue("other").open()
        assert (await http.get("/v1/topics")).json() == {"topics": []}
        assert [each["queue"] for each in (await http.get("/v1/queues")).json()["queues"]] == ["other"]


async def test_a_prefix_does_not_cover_the_topics_of_other_write_ahead_logs(
    tmp_path: Path, create_token: CreateToken
) -> None:
    token = (await create_token("admin", prefix="w")).token
    async with served(tmp_path / "book") as (url, book), client(url, token) as http:
        for namespace in ("metrics", "w-metrics"):
            await book.wal(namespace).open_region(7, create=True)
        for end in ("data", "meta"):
            assert (await http.get(f"/v1/topics/wal.metrics.7.{end}")).status_code == 403
            assert (await http.delete(f"/v1/topics/wal.metrics.7.{end}")).status_code == 403
            assert (await http.get(f"/v1/topics/wal.w-metrics.7.{end}")).status_code == 200
        assert (await http.get("/v1/topics/wal.7.data")).status_code == 404


async def test_events_of_other_prefixes_are_left_out_of_a_tag(tmp_path: Path, create_token: CreateToken) -> None:
    token = (await create_token("viewer", prefix="other")).token
    topics = ("orders", "other-1")
    async with served(tmp_path / "book") as (url, book), client(url, token) as http:
        for topic in topics:
            await book.journal(topic).append("o-1", [Event(topic, tags={"paid"})])
        for topic in topics:
            await replicate(book.log, book.store, topic)
        await tick(book.log, book.store, topics)
        for topic in topics:
            await replicate(book.log, book.store, topic)
        for topics_wanted in ({}, {"topics": "orders,other-1"}):
            *events, _ = lines(await http.get("/v1/tags/paid/events", params=topics_wanted))
            assert [each["payload"] for each in events] == ["other-1"]
        async with asyncio.timeout(30), http.stream("GET", "/v1/tags/paid/events?follow=true") as followed:
            async for line in followed.aiter_lines():
                if line.startswith("data: "):
                    assert json.loads(line.removeprefix("data: "))["payload"] == "other-1"
                    break


async def test_a_revoked_token_is_refused_within_seconds(tmp_path: Path, create_token: CreateToken) -> None:
    admin, other = await create_token("admin"), await create_token("viewer")
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        as_admin = {"authorization": f"Bearer {admin.token}"}
        as_other = {"authorization": f"Bearer {other.token}"}
        assert (await http.get("/v1/topics", headers=as_other)).status_code == 200
        assert (await http.delete(f"/v1/tokens/{other.id}", headers=as_admin)).status_code == 204
        assert (await http.get("/v1/topics", headers=as_other)).status_code == 401
        listed = (await http.get("/v1/tokens", headers=as_admin)).json()["tokens"]
        assert {each["id"] for each in listed if each["revoked_at_ms"]} == {other.id}
        assert admin.token not in (await http.get("/v1/tokens", headers=as_admin)).text
    database = ServerDatabase(tmp_path / "book")
    assert all(each.last_used_at_ms for each in Tokens(database, SystemClock()).list())
    await database.close()


async def test_only_the_server_writes_the_audit_and_only_an_admin_reads_it(
    tmp_path: Path, create_token: CreateToken
) -> None:
    admin, operator = (await create_token("admin")).token, (await create_token("operator")).token
    path = "/v1/journals/tidebook-audit/x/events"
    async with served(tmp_path / "book") as (url, _), client(url, admin) as http:
        assert (await http.post(path, json={"events": [{"payload": 1}]})).status_code == 403
        assert (await http.get(path)).status_code == 200
        assert (await http.get(path, headers={"authorization": f"Bearer {operator}"})).status_code == 403


@pytest.mark.parametrize("ends", ["revoked", "expired"])
async def test_a_stream_ends_with_its_token(tmp_path: Path, create_token: CreateToken, ends: str) -> None:
    admin = await create_token("admin")
    other = await create_token("viewer", expire_after_s=3.0 if ends == "expired" else None)
    path = "/v1/journals/orders/o-1/events?follow=true"
    async with (
        served(tmp_path / "book") as (url, book),
        client(url, other.token) as http,
        client(url, admin.token) as boss,
    ):
        await book.journal("orders").append("o-1", [Event(1)])
        async with http.stream("GET", path) as stream, boss.stream("GET", path) as unaffected:
            lines = stream.aiter_lines()
            while (await anext(lines)) != "retry: 2000":
                pass
            if ends == "revoked":
                assert (await boss.delete(f"/v1/tokens/{other.id}")).status_code == 204
            async with asyncio.timeout(30):
                assert "event: end" in [line async for line in lines]
            await book.journal("orders").append("o-1", [Event(2)])
            async with asyncio.timeout(30):
                async for line in unaffected.aiter_lines():
                    if line.startswith("data: ") and json.loads(line[6:])["payload"] == 2:
                        break
        assert (await http.get(path)).status_code == 401


async def test_a_claim_that_waits_ends_with_its_token(tmp_path: Path, create_token: CreateToken) -> None:
    admin, other = await create_token("admin"), await create_token("operator")
    async with (
        served(tmp_path / "book") as (url, book),
        client(url, other.token) as http,
        client(url, admin.token) as boss,
    ):
        await book.queue("mail").open()
        claiming = asyncio.create_task(http.post("/v1/queues/mail/claims", json={"wait_s": 20}))
        await asyncio.sleep(0.3)
        assert (await boss.delete(f"/v1/tokens/{other.id}")).status_code == 204
        await book.queue("mail").put(1)
        assert (await asyncio.wait_for(claiming, 15)).status_code == 401
        assert (await book.queue("mail").status()).due == 1


async def test_a_long_read_ends_with_its_token(tmp_path: Path, create_token: CreateToken) -> None:
    admin, other = await create_token("admin"), await create_token("viewer")
    async with (
        served(tmp_path / "book") as (url, book),
        client(url, other.token) as http,
        client(url, admin.token) as boss,
    ):
        for _ in range(20):
            await book.journal("orders").append("o-1", [Event("x" * 900_000)])
        async with http.stream("GET", "/v1/journals/orders/o-1/events") as stream:
            found = stream.aiter_lines()
            assert json.loads(await anext(found))["seq_nr"] == 1
            assert (await boss.delete(f"/v1/tokens/{other.id}")).status_code == 204
            *_, last = [line async for line in found]
        assert json.loads(last)["problem"]["type"] == "urn:tidebook:error:sign-in-required"


async def test_a_body_that_arrives_after_its_token_has_ended_changes_nothing(
    tmp_path: Path, create_token: CreateToken
) -> None:
    admin, other = await create_token("admin"), await create_token("operator")
    async with (
        served(tmp_path / "book") as (url, book),
        client(url, other.token) as http,
        client(url, admin.token) as boss,
    ):

        async def body() -> AsyncIterator[bytes]:
            yield b'{"events": '
            assert (await boss.delete(f"/v1/tokens/{other.id}")).status_code == 204
            yield b'[{"payload": 1}]}'

        path, kind = "/v1/journals/orders/o-1/events", {"content-type": "application/json"}
        assert (await http.post(path, content=body(), headers=kind)).status_code == 401
        assert await book.journal("orders").pointer("o-1") is None


@pytest.mark.parametrize("path", ["/v1/journals/orders/o-1/events?follow=true", "/journal/live?topic=orders&id=o-1"])
async def test_streams_end_when_their_browser_signs_out(tmp_path: Path, create_token: CreateToken, path: str) -> None:
    token = (await create_token("viewer")).token
    async with served(tmp_path / "book") as (url, book), client(url) as http, client(url) as other:
        await book.journal("orders").append("o-1", [Event(1)])
        [csrf, _] = [
            (await browser.post("/v1/session", json={"token": token})).json()["csrf_token"] for browser in (http, other)
        ]
        async with http.stream("GET", path) as stream, other.stream("GET", path) as unaffected:
            assert (stream.status_code, unaffected.status_code) == (200, 200)
            assert (await http.delete("/v1/session", headers={"x-csrf-token": csrf})).status_code == 204
            async with asyncio.timeout(30):
                assert "event: end" in [line async for line in stream.aiter_lines()]
            await book.journal("orders").append("o-1", [Event("later")])
            async with asyncio.timeout(30):
                async for line in unaffected.aiter_lines():
                    if line.startswith("data: ") and "later" in line:
                        break
                else:
                    pytest.fail("the stream of the other browser has ended")
        assert (await http.get(path)).status_code == 401


async def test_an_open_stream_ends_when_the_server_needs_tokens(tmp_path: Path) -> None:
    path = "/v1/journals/orders/o-1/events?follow=true"
    async with served(tmp_path / "book") as (url, _), client(url) as http, http.stream("GET", path) as stream:
        assert stream.status_code == 200
        created = await http.post("/v1/tokens", json={"name": "first", "role": "admin"})
        assert created.status_code == 201
        async with asyncio.timeout(30):
            assert "event: end" in [line async for line in stream.aiter_lines()]
