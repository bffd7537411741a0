"""Connections of clients that send too much, too slowly or invalid bytes are closed; others are served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.integration.server.running import client, served
from tidebook.server import protocol

PATH = "/v1/journals/orders/o-1/events"


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    where = httpx.URL(url)
    return await asyncio.open_connection(where.host, where.port)


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """Return what is received until the server closes the connection."""
    try:
        return await asyncio.wait_for(reader.read(), 30)
    except ConnectionError:
        return b""


@pytest.mark.parametrize("part", [b"x: " + b"y" * 60_000, b"x: y\r\n" * 10_000])
async def test_an_endless_head_is_refused(tmp_path: Path, part: bytes) -> None:
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        reader, writer = await connect(url)
        writer.write(b"GET /v1/topics HTTP/1.1\r\nhost: localhost\r\n" + part)
        await writer.drain()
        writer.write(b"y" * 60_000)
        head, _, body = (await rest_of(reader)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 413")
        problem = json.loads(body)
        assert (problem["type"], problem["limit_bytes"]) == ("urn:tidebook:error:too-large", protocol.HEAD_BYTES_MAX)
        writer.close()
        large = await http.get("/v1/topics", headers={"x-large": "y" * 50_000})
        assert large.status_code == 200


CHUNKED = b"POST /v1/journals/orders/o-1/events HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("part", [b"x: y\r\n" * 2_000, b"y" * 12_000])
@pytest.mark.parametrize("begin", [b"2\r\n{}\r\n0\r\nx: y\r\nx: ", b"2;x="], ids=["trailers", "extension"])
async def test_endless_trailers_are_refused(tmp_path: Path, begin: bytes, part: bytes) -> None:
    async with served(tmp_path / "book") as (url, _):
        reader, writer = await connect(url)
        writer.write(CHUNKED + begin)
        for _ in range(60):  # more than the server reads in one call
            writer.write(part)
        assert not await asyncio.wait_for(rest_of(reader), 15)  # long before the request's deadline
        writer.close()


async def test_a_body_of_many_small_chunks_is_not_mistaken_for_an_endless_head(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        body = b'{"events":[{"payload":"' + b"x" * 30_000 + b'"}]}'

        async def chunks() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 4):
                yield body[start : start + 4]

        answer = await http.post(PATH, content=chunks(), headers={"content-type": "application/json"})
        assert answer.status_code == 200
        assert await book.journal("orders").pointer("o-1") == 1


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /v1/topics HTT",
        b"GET /v1/topics HTTP/1.1\r\nhost: localhost\r\nx-late: ",
        # The answer does not wait for the body, which is never complete.
        b"GET /v1/health/live HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\nabc",
    ],
)
async def test_a_client_that_does_not_complete_its_request_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(protocol, "SENDING_S_MAX", 0.2)
    async with served(tmp_path / "book") as (url, _):
        reader, writer = await connect(url)
        writer.write(sent)
        await rest_of(reader)
        writer.close()


async def test_a_request_that_takes_long_is_not_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "SENDING_S_MAX", 0.1)
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await book.queue("mail").open()
        for _ in range(2):  # the second request on the same connection
            waited = await http.post("/v1/queues/mail/claims", json={"wait_s": 3})
            assert (waited.status_code, waited.json()) == (200, {"jobs": []})


@pytest.mark.parametrize("part", [b"", b"{", b'{"limit": 1}'])
async def test_a_request_whose_body_is_cut_off_changes_nothing(tmp_path: Path, part: bytes) -> None:
    """Without its body, a claim would be one for a client that is no longer there."""
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await book.queue("mail").put(1)
        _, writer = await connect(url)
        head = b"POST /v1/queues/mail/claims HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: 100\r\n\r\n" + part)
        await writer.drain()
        assert (await http.get("/v1/topics")).status_code == 200
        writer.transport.abort()
        for _ in range(10):
            status = (await http.get("/v1/queues/mail")).json()
            assert (status["due"], status["processing"]) == (1, 0)


async def test_input_that_is_not_http_is_answered_with_a_problem(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, _):
        reader, writer = await connect(url)
        writer.write(b"\x16\x03\x01 hello\r\n\r\n")
        head, _, body = (await rest_of(reader)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert json.loads(body)["type"] == "urn:tidebook:error:invalid-input"
        writer.close()


async def test_too_many_connections_are_refused_with_a_problem(tmp_path: Path) -> None:
    file = tmp_path / "tidebook.toml"
    file.write_text('folder = "book"\n[server]\nconnections_max = 2\n')
    async with served(file) as (url, _), client(url) as http:
        assert (await http.get("/v1/topics")).status_code == 200
        idle, one_more = await connect(url), await connect(url)
        one_more[1].write(b"GET /v1/topics HTTP/1.1\r\nhost: localhost\r\n\r\n")
        head, _, body = (await rest_of(one_more[0])).partition(b"\r\n\r\n")  # until the server closes it
        assert head.startswith(b"HTTP/1.1 503")
        assert b"content-type: application/problem+json" in head
        assert b"retry-after: 1" in head
        assert json.loads(body)["type"] == "urn:tidebook:error:too-many-connections"
        one_more[1].close()
        metrics = await asyncio.wait_for(_answered(http), 20)
        assert 'tidebook_server_requests_total{route="none",status="503"}' in metrics
        idle[1].close()


LISTING = b"GET /v1/queues/mail/entries HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        LISTING,
        LISTING.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"),
        LISTING * 2,  # the second answer waits for the first
    ],
)
async def test_an_answer_that_a_client_does_not_read_is_dropped(tmp_path: Path, sent: bytes) -> None:
    file = tmp_path / "tidebook.toml"
    file.write_text('folder = "book"\n[server]\nconnections_max = 1\nsend_s = 0.3\n')
    async with served(file) as (url, book), client(url) as http:
        await book.queue("mail").put_many(["x" * 900_000] * 10)
        reader, writer = await connect(url)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(sent)
        async with asyncio.timeout(30):
            # The connection of the client that does not read is the only one that is allowed.
            while (await http.get("/v1/health/live")).status_code == 503:  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.05)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert len(await rest_of(reader)) < 9_000_000
        writer.close()


async def _answered(http: httpx.AsyncClient) -> str:
    """Return the metrics as soon as the server has noticed that a connection is closed."""
    while (answer := await http.get("/metrics")).status_code == 503:
        pass
    return answer.text


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("length", ["content-length: 48", "transfer-encoding: chunked"])
async def test_the_body_of_a_request_for_another_protocol_is_not_mistaken_for_a_request(
    tmp_path: Path, split: bool, length: str
) -> None:
    inner = b"DELETE /v1/topics/orders HTTP/1.1\r\nhost: localhost\r\n\r\n"
    upgrade = "connection: upgrade\r\nupgrade: h2c\r\n"
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{upgrade}{length}\r\n\r\n"
    async with served(tmp_path / "book") as (url, book):
        await book.journal("orders").create()
        reader, writer = await connect(url)
        writer.write(head.encode() + (b"" if split else inner))
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"leave Upgrade out" in await reader.readuntil(b"}")
        if split:
            writer.write(inner)
        assert not await rest_of(reader)
        assert await book.topics() == ["orders"]
        writer.close()


async def test_a_request_for_another_protocol_without_a_body_is_answered(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        for _ in range(2):
            asked = await http.get("/v1/topics", headers={"connection": "upgrade", "upgrade": "h2c"})
            assert (asked.status_code, asked.http_version) == (200, "HTTP/1.1")
