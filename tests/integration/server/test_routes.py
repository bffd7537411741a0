"""Every route answers its example request as its OpenAPI document describes."""

from __future__ import annotations

from pathlib import Path

import msgspec

import tidebook
from tests.integration.server.examples import EXAMPLES, prepare, request_of
from tests.integration.server.running import client, lines, served
from tidebook.api.openapi import document
from tidebook.api.routes import BY_NAME, ROUTES
from tidebook.runtime.clock import SystemClock
from tidebook.server.app import HANDLERS
from tidebook.server.database import ServerDatabase
from tidebook.server.tokens import Tokens


def test_every_route_has_a_handler_and_an_example() -> None:
    names = {route.name for route in ROUTES}
    assert len(names) == len(ROUTES)
    assert set(HANDLERS) == names
    assert set(EXAMPLES) == names


async def test_every_route_answers(tmp_path: Path) -> None:
    database = ServerDatabase(tmp_path / "book")
    token = (await Tokens(database, SystemClock()).create("root", "admin")).token
    await database.close()
    async with served(tmp_path / "book") as (url, book), client(url, token) as http:
        known = {**await prepare(book), "token": token}
        for name in EXAMPLES:
            route = BY_NAME[name]
            request = request_of(http, route, known)
            response = await http.send(request, stream=True)
            if name == "queues.listen":
                assert response.headers["content-type"] == "text/event-stream"
                await response.aclose()
                continue
            await response.aread()
            assert response.status_code == route.status, (name, response.text)
            if route.form == "none":
                assert response.content == b""
            elif route.form == "text":
                assert response.headers["content-type"].startswith("text/plain")
            elif route.form in ("lines", "events"):
                *found, last = lines(response)
                assert last == {"end": True}
                msgspec.convert(found, list[route.response])  # type: ignore[name-defined]
            elif route.response is not None:
                answer = msgspec.json.decode(response.content, type=route.response)
                for field, value in (
                    ("session", getattr(answer, "session", None)),
                    ("job", getattr(answer, "id", None) if name == "pipeline.start" else None),
                    ("new_token", getattr(answer, "id", None) if name == "access.create_token" else None),
                ):
                    if isinstance(value, str):
                        known[field] = value


async def test_the_document_is_served_and_has_every_route_and_struct(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        found = (await http.get("/v1/openapi.json")).json()
    assert found == msgspec.json.decode(msgspec.json.encode(document(tidebook.__version__)))
    operations = {
        operation["operationId"]: operation for path in found["paths"].values() for operation in path.values()
    }
    assert set(operations) == set(BY_NAME)
    for name, route in BY_NAME.items():
        operation = operations[name]
        schemas = found["components"]["schemas"]
        if route.body is not None:
            [content] = operation["requestBody"]["content"].values()
            fields = schemas[content["schema"]["$ref"].rpartition("/")[2]]["properties"]
            assert set(fields) == set(route.body.__struct_fields__), name
        parameters = {each["name"] for each in operation["parameters"] if each["in"] == "query"}
        assert parameters == set(route.query.__struct_fields__ if route.query else ()), name
        assert {each["name"] for each in operation["parameters"] if each["in"] == "path"} == set(route.parameters)
        assert operation["x-role"] == route.role.label
