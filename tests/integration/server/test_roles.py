"""Every route refuses requests without a token, and with a weak, foreign or expired one."""

from __future__ import annotations

from pathlib import Path

from tests.integration.server.conftest import CreateToken
from tests.integration.server.examples import prepare, request_of
from tests.integration.server.running import client, served
from tidebook.api.access import Role
from tidebook.api.routes import ROUTES


async def test_every_route_declares_a_role_and_keeps_to_it(tmp_path: Path, create_token: CreateToken) -> None:
    tokens = {role: (await create_token(role)).token for role in ("viewer", "operator", "admin")}
    foreign = (await create_token("admin", prefix="other-")).token
    expired = (await create_token("admin", expires_s=0.001)).token
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


async def test_only_the_server_writes_the_audit_and_only_an_admin_reads_it(
    tmp_path: Path, create_token: CreateToken
) -> None:
    admin, operator = (await create_token("admin")).token, (await create_token("operator")).token
    path = "/v1/journals/tidebook-audit/x/events"
    async with served(tmp_path / "book") as (url, _), client(url, admin) as http:
        assert (await http.post(path, json={"events": [{"payload": 1}]})).status_code == 403
        assert (await http.get(path)).status_code == 200
        assert (await http.get(path, headers={"authorization": f"Bearer {operator}"})).status_code == 403
