"""Answers that are sent at once, and bodies that arrive at once, behave like all others."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.integration.server.running import client, served
from tests.integration.server.test_connections import PATH, connect, rest_of
from tidebook.server.audit_entry import AUDIT_TOPIC

BODY = b'{"events":[{"payload":1}]}'
HEAD = b"POST /v1/journals/orders/o-1/events HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
APPEND = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes, bytes]:
    """Return the status, the head and the body of the next answer."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
    return int(head[9:12]), head, await reader.readexactly(int(length or 0))


async def test_requests_that_arrive_together_are_answered_in_order(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, _):
        reader, writer = await connect(url)
        delete = b"DELETE /v1/journals/orders/o-1 HTTP/1.1\r\nhost: localhost\r\n\r\n"
        writer.write(APPEND + APPEND + delete + APPEND)
        answers = [await answer(reader) for _ in range(4)]
        assert [status for status, _, _ in answers] == [200, 200, 204, 200]
        assert [json.loads(body)["first"] for _, _, body in answers if body] == [1, 2, 1]
        assert b"content-type: application/json\r\n" in answers[0][1]
        assert b"x-content-type-options: nosniff\r\n" in answers[0][1]
        assert all(b"cache-control: no-store\r\n" in head and b"\ndate: " in head for _, head, _ in answers)
        assert b"content-" not in answers[2][1]
        writer.close()


@pytest.mark.parametrize("together", [True, False])
async def test_a_client_may_wait_for_leave_to_send_its_body(tmp_path: Path, together: bool) -> None:
    async with served(tmp_path / "book") as (url, _):
        reader, writer = await connect(url)
        head = HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY)
        writer.write(head + BODY if together else head)
        if not together:
            assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)).startswith(b"HTTP/1.1 100")
            writer.write(BODY)
        assert (await answer(reader))[0] == 200
        writer.write(APPEND)
        assert (await answer(reader))[0] == 200
        writer.close()


@pytest.mark.parametrize("end", [b"HTTP/1.0\r\n", b"HTTP/1.1\r\nconnection: close\r\n"])
async def test_a_client_that_wants_one_answer_gets_it_and_the_end(tmp_path: Path, end: bytes) -> None:
    async with served(tmp_path / "book") as (url, _):
        reader, writer = await connect(url)
        writer.write(APPEND.replace(b"HTTP/1.1\r\n", end))
        head, _, body = (await rest_of(reader)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in head
        assert json.loads(body)["first"] == 1
        writer.close()


async def test_a_body_over_the_limit_that_arrives_at_once_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tidebook.toml"
    file.write_text('folder = "book"\n[server]\nbody_bytes_max = 1024\n')
    async with served(file) as (url, book):
        reader, writer = await connect(url)
        body = b'{"events":[{"payload":"%b"}]}' % (b"x" * 2_000)
        for length in (b"content-length: %d\r\n\r\n" % len(body), b"transfer-encoding: chunked\r\n\r\n"):
            chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            writer.write(HEAD + length + (body if b"length" in length else chunked))
            status, _, problem = await answer(reader)
            assert (status, json.loads(problem)["limit_bytes"]) == (413, 1024)
        writer.write(APPEND)
        assert (await answer(reader))[0] == 200
        assert await book.journal("orders").pointer("o-1") == 1
        writer.close()


async def test_appends_of_clients_that_hang_up_are_whole_and_audited(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book):
        for _ in range(40):
            _, writer = await connect(url)
            writer.write(APPEND + APPEND[:-3])  # the second one never becomes complete
            await writer.drain()
            writer.transport.abort()
        async with client(url) as http:
            for _ in range(5):
                assert (await http.post(PATH, json={"events": [{"payload": 1}]})).status_code == 200
    async with served(tmp_path / "book") as (_, book):
        journal, audit = book.journal("orders"), book.journal(AUDIT_TOPIC)
        chains = [each async for each in audit.ids()]
        entries = [event.payload async for event in audit.read(chains[0])]
        recorded = [each["status"] for each in entries if each["action"] == "journals.append"]
        assert len(chains) == 1
        assert recorded == [200] * (await journal.pointer("o-1") or 0)
        assert len(recorded) >= 5
