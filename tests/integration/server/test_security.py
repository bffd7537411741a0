"""The security of the server: host names, origins, browser sessions, bounds, masked fields and TLS."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

import tidebook
from tests.integration.server.conftest import CreateToken
from tests.integration.server.examples import request_of
from tests.integration.server.running import client, lines, served
from tidebook import Event, InvalidInput
from tidebook.api.access import Role
from tidebook.api.errors import SignInRequired
from tidebook.api.routes import ROUTES
from tidebook.queue.port import QueueSettings
from tidebook.replication.ticks import tick
from tidebook.server.serve import Tls
from tidebook.testing.replicating import replicate
from tidebook.testing.servers.security import make_security

APPEND = {"events": [{"payload": 1}]}
PATH = "/v1/journals/orders/o-1/events"


def settings(folder: Path, text: str) -> Path:
    file = folder / "tidebook.toml"
    file.write_text(f'folder = "book"\n{text}')
    return file


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8470", "127.0.0.1.evil.example", "[::2]"])
async def test_another_host_name_is_refused(tmp_path: Path, host: str) -> None:
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        refused = await http.get("/v1/topics", headers={"host": host})
        assert refused.status_code == 403
        for allowed in ("localhost:8470", "127.0.0.1", "[::1]:1"):
            assert (await http.get("/v1/topics", headers={"host": allowed})).status_code == 200


@pytest.mark.parametrize(
    "headers", [{"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}, {"origin": "null"}]
)
async def test_a_page_of_another_site_changes_nothing(tmp_path: Path, headers: dict[str, str]) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        assert (await http.post(PATH, json=APPEND, headers=headers)).status_code == 403
        same = {"origin": url, "sec-fetch-site": "same-origin"}
        assert (await http.post(PATH, json=APPEND, headers=same)).status_code == 200
        assert await book.journal("orders").pointer("o-1") == 1


async def test_a_form_of_another_content_type_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        refused = await http.post(PATH, content=b'{"events":[{"payload":1}]}', headers={"content-type": "text/plain"})
        assert refused.status_code == 415


async def test_a_remote_book_without_a_token_explains_how_to_set_one(tmp_path: Path, create_token: CreateToken) -> None:
    await create_token("viewer")
    async with served(tmp_path / "book") as (url, _), tidebook.open(url) as book:
        with pytest.raises(SignInRequired, match="needs a token: pass it as token=, or to a command in TIDEBOOK_TOKEN"):
            await book.journal("orders").pointer("o-1")


async def test_a_browser_signs_in_and_needs_its_csrf_token(tmp_path: Path, create_token: CreateToken) -> None:
    token = (await create_token("operator")).token
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        assert (await http.post("/v1/session", json={"token": "tb_no"})).status_code == 401
        signed_in = await http.post("/v1/session", json={"token": token})
        assert signed_in.status_code == 200
        cookie = signed_in.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert token not in cookie
        csrf = (await http.get("/v1/session")).json()["csrf_token"]
        assert csrf == signed_in.json()["csrf_token"]
        assert (await http.post(PATH, json=APPEND)).status_code == 403
        assert (await http.post(PATH, json=APPEND, headers={"x-csrf-token": "wrong"})).status_code == 403
        assert (await http.post(PATH, json=APPEND, headers={"x-csrf-token": csrf})).status_code == 200
        assert (await http.delete("/v1/session", headers={"x-csrf-token": csrf})).status_code == 204
        assert (await http.get("/v1/session")).status_code == 401


async def test_bodies_rates_and_streams_are_bounded(tmp_path: Path) -> None:
    file = settings(tmp_path, "[server]\nbody_bytes_max = 1000\nrate_per_s = 5\nrate_burst = 12\nstreams_max = 1\n")
    async with served(file) as (url, _), client(url) as http:
        too_large = await http.post(PATH, json={"events": [{"payload": "x" * 2000}]})
        assert (too_large.status_code, too_large.json()["limit_bytes"]) == (413, 1000)

        async def chunks() -> object:
            for _ in range(10):
                yield b" " * 500

        chunked = await http.post(PATH, content=chunks(), headers={"content-type": "application/json"})  # type: ignore[arg-type]
        assert chunked.status_code == 413
        async with http.stream("GET", PATH, params={"follow": True}) as stream:
            assert stream.status_code == 200
            second = await http.get(PATH, params={"follow": True})
            assert second.status_code == 429
        statuses = [(await http.get("/v1/topics")).status_code for _ in range(30)]
        assert statuses[0] == 200
        refused = await http.get("/v1/topics")
        assert 429 in statuses or refused.status_code == 429
        assert int((await http.get("/v1/topics")).headers.get("retry-after", "1")) >= 1


async def test_without_a_token_only_a_small_body_is_read(tmp_path: Path, create_token: CreateToken) -> None:
    token = (await create_token("viewer")).token
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        for size, status in ((9_000, 401), (11_000, 413), (1_000_000, 413)):
            assert (await http.post("/v1/session", json={"token": "x" * size})).status_code == status
            assert (await http.post("/acts/access.sign_in", data={"token": "x" * size})).status_code == status

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b" " * 1_000

        chunked = await http.post("/v1/session", content=chunks(), headers={"content-type": "application/json"})
        assert (chunked.status_code, chunked.json()["limit_bytes"]) == (413, 10_000)
        assert (await http.post("/v1/session", json={"token": token})).status_code == 200


async def test_a_deadline_cancels_the_request(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await book.queue("mail").open()
        began = asyncio.get_running_loop().time()
        waited = await http.post("/v1/queues/mail/claims", json={"wait_s": 30}, headers={"request-timeout": "1.5"})
        assert waited.json() == {"jobs": []}
        assert asyncio.get_running_loop().time() - began < 10
        for wrong in ("0", "-1", "nan", "x", "100000"):
            assert (await http.get("/v1/topics", headers={"request-timeout": wrong})).status_code == 400


async def test_fields_are_masked_unless_an_admin_asks(tmp_path: Path, create_token: CreateToken) -> None:
    file = settings(tmp_path, '[mask]\n"orders.*.card" = "last4"\n"mail.to" = "hide"\n')
    viewer, admin = (await create_token("viewer")).token, (await create_token("admin")).token
    async with served(file) as (url, book), client(url, viewer) as http:
        payload = {"card": "4111111111111111", "lines": [{"card": "1234"}], "total": 3}
        await book.journal("orders").append("o-1", [Event(payload, metadata={"card": "5500000000000004"})])
        await book.queue("mail").put({"to": "x@y", "n": 1})
        [line, _] = lines(await http.get(PATH))
        assert line["payload"] == {"card": "***1111", "lines": [{"card": "***"}], "total": 3}
        assert line["metadata"] == {"card": "***0004"}
        entries = (await http.get("/v1/queues/mail/entries")).json()["entries"]
        assert entries[0]["data"] == {"to": "***", "n": 1}
        assert (await http.get(PATH, params={"unmask": True})).status_code == 403
        as_admin = {"authorization": f"Bearer {admin}"}
        assert lines(await http.get(PATH, headers=as_admin))[0]["payload"]["card"] == "***1111"
        [line, _] = lines(await http.get(PATH, params={"unmask": True}, headers=as_admin))
        assert line["payload"] == payload
        audit = book.journal("tidebook-audit")
        [chain] = [id async for id in audit.ids()]
        entries = [event.payload async for event in audit.read(chain)]
        assert [(each["action"], each["unmask"]) for each in entries[1:]] == [("journals.read", True)]


SECRET = "4111111111111111"


async def test_no_read_shows_a_masked_field_to_a_viewer(tmp_path: Path, create_token: CreateToken) -> None:
    rules = "\n".join(f'"{name}.*.card" = "hide"' for name in ("orders", "mail", "metrics"))
    token = (await create_token("viewer")).token
    async with served(settings(tmp_path, f"[mask]\n{rules}\n")) as (url, book), client(url, token) as http:
        secret = {"deep": [{"card": SECRET}]}
        orders, mail = book.journal("orders"), book.queue("mail", settings=QueueSettings(max_timeouts=0))
        await orders.append("o-1", [Event(secret, tags={"paid"}, metadata=secret)])
        await orders.save_snapshot("o-1", seq_nr=1, payload=secret)
        await mail.put_many([secret] * 3)
        await mail.fail(await mail.claim(), reason=f"ValueError: {SECRET} is refused")
        await mail.claim()
        region = await book.wal("metrics").open_region(7, create=True)
        await region.write(1, [secret])
        await replicate(book.log, book.store, "orders")
        await tick(book.log, book.store, ["orders"])
        await replicate(book.log, book.store, "orders")
        shown = 0
        for route in ROUTES:
            if route.method != "GET" or route.role > Role.VIEWER or route.name == "queues.listen":
                continue
            for follow in (False, True) if route.form == "events" else (False,):
                request = request_of(http, route, {})
                if follow:
                    request.url = request.url.copy_merge_params({"follow": True})
                text = await _first_of(http, request) if follow else (await http.send(request)).text
                assert SECRET not in text, (route.name, follow)
                shown += "***" in text
        assert shown == 8  # journal and tag, each read and followed; snapshot, entries, dead letters, write-ahead log


async def _first_of(http: httpx.AsyncClient, request: httpx.Request) -> str:
    """Return the data of the first event of a stream."""
    response = await http.send(request, stream=True)
    try:
        async with asyncio.timeout(20):
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    return line
    finally:
        await response.aclose()
    return ""


async def test_requests_without_a_token_do_not_use_up_the_rate_of_others(
    tmp_path: Path, create_token: CreateToken
) -> None:
    token = (await create_token("viewer")).token
    file = settings(tmp_path, "[server]\nrate_per_s = 0.001\nrate_burst = 2\n")
    async with served(file) as (url, _), client(url) as http, client(url, token) as known:
        statuses = [(await http.get("/v1/health/live")).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        assert (await known.get("/v1/topics")).status_code == 200
        elsewhere = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
        async with client(url, transport=elsewhere) as other:
            assert (await other.get("/v1/health/live")).status_code == 200
            assert (await other.get("/sign-in")).status_code == 200
        assert (await http.get("/sign-in")).status_code == 429


@pytest.mark.parametrize("token", ["viewer", "tb_unknown", None])
async def test_refused_requests_are_counted_too(tmp_path: Path, create_token: CreateToken, token: str | None) -> None:
    viewer = (await create_token("viewer")).token
    file = settings(tmp_path, "[server]\nrate_per_s = 0.001\nrate_burst = 2\n")
    async with served(file) as (url, _), client(url, viewer if token == "viewer" else token) as http:
        refused = 403 if token == "viewer" else 401
        assert [(await http.delete("/v1/topics/orders")).status_code for _ in range(3)] == [refused, refused, 429]


async def test_a_public_address_needs_tls_and_tokens(tmp_path: Path, create_token: CreateToken) -> None:
    with pytest.raises(InvalidInput, match="--tls-cert"):
        async with served(tmp_path / "book", host="0.0.0.0"):
            pass
    tls = make_tls(tmp_path)
    with pytest.raises(InvalidInput, match="tidebook token create"):
        async with served(tmp_path / "book", host="0.0.0.0", tls=tls[0]):
            pass


def make_tls(folder: Path) -> tuple[Tls, Path]:
    made = make_security(folder / "security").certificates
    return Tls(str(made.server), str(made.server_key)), made.authority


async def test_a_client_that_checks_names_connects_by_tls(tmp_path: Path, create_token: CreateToken) -> None:
    token = (await create_token("admin")).token
    tls, ca = make_tls(tmp_path)
    trusting = ssl.create_default_context(cafile=str(ca))
    async with served(tmp_path / "book", host="127.0.0.1", tls=tls) as (url, _):
        assert url.startswith("https://")
        port = httpx.URL(url).port
        async with client(f"https://localhost:{port}", token, verify=trusting) as http:
            assert (await http.post(PATH, json=APPEND)).status_code == 200
        async with client(f"https://localhost:{port}", token) as http:
            with pytest.raises(httpx.ConnectError):  # the certificate's authority is not trusted
                await http.get("/v1/topics")
        sni = {"sni_hostname": "other.example"}
        async with client(f"https://127.0.0.1:{port}", token, verify=trusting) as http:
            with pytest.raises(httpx.ConnectError, match=r"other\.example"):
                await http.get("/v1/topics", extensions=sni)


async def test_tls_1_2_is_served_with_authenticated_encryption_only(tmp_path: Path) -> None:
    tls, ca = make_tls(tmp_path)
    async with served(tmp_path / "book", tls=tls) as (url, _):
        modern, old = (ssl.create_default_context(cafile=str(ca)) for _ in range(2))
        modern.maximum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
        modern.set_ciphers("ECDHE+AESGCM")
        old.set_ciphers("ECDHE-ECDSA-AES256-SHA384:ECDHE-RSA-AES256-SHA384")
        port = httpx.URL(url).port
        _, writer = await asyncio.open_connection("localhost", port, ssl=modern)
        assert "GCM" in writer.get_extra_info("cipher")[0]
        writer.close()
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("localhost", port, ssl=old)


def test_tokens_are_shown_once_by_the_command(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tidebook.cli", *arguments, "--book", str(tmp_path / "book"), "--json"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    made = json.loads(
        run("token", "create", "billing", "--role", "operator", "--prefix", "orders", "--new-book").stdout
    )
    assert made["token"].startswith("tb_")
    listed = run("token", "list").stdout
    assert made["id"] in listed
    assert made["token"] not in listed
    assert made["token"].encode() not in (tmp_path / "book" / "server.db").read_bytes()
    assert run("token", "revoke", made["id"]).returncode == 0
    assert run("token", "revoke", "nobody").returncode == 4
    assert json.loads(run("token", "list").stdout)["revoked_at_ms"] is not None
    assert run("token", "create", "x", "--role", "king").returncode == 2
