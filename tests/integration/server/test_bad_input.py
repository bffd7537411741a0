"""Bad input causes no status 500, no traceback and no hang; each answer says what is wrong."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.server.running import served
from tidebook.api.openapi import document
from tidebook.api.routes import ROUTES
from tidebook.runtime.clock import SystemClock
from tidebook.server.database import ServerDatabase
from tidebook.server.tokens import Tokens

#: Jobs are child processes; the audit and rebuilds read everything; a stream of due dates never ends.
LEFT_OUT = {"pipeline.start", "pipeline.cancel", "queues.listen"}


#: The header with a token of the server, which requires one as soon as any token exists.
AUTHORIZATION: dict[str, str] = {}
JSON_BODY = {"content-type": "application/json"}
#: The deadline that each request sets, and the time after which a missing answer fails the test.
REQUEST_S, ANSWER_S = 2, 30


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a server in a thread, for tests that are not async."""
    folder: Path = tmp_path_factory.mktemp("served") / "book"
    AUTHORIZATION["authorization"] = f"Bearer {asyncio.run(_admin_token(folder))}"
    found: list[str] = []
    ready, stop = threading.Event(), threading.Event()

    async def run() -> None:
        async with served(folder) as (address, _):
            found.append(address)
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(60)
    yield found[0]
    stop.set()
    thread.join(60)
    assert not thread.is_alive(), "a request of these tests still runs"


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    """Return one client for all requests; a request without an answer in time fails its test."""
    with httpx.Client(
        base_url=url, timeout=ANSWER_S, verify=False
    ) as client:  # the address is http://, so there is nothing to verify
        yield client


async def _admin_token(folder: Path) -> str:
    database = ServerDatabase(folder)
    try:
        return (await Tokens(database, SystemClock()).create("fuzz", "admin")).token
    finally:
        await database.close()


def check(response: httpx.Response) -> None:
    """Check that an answer is a success or a problem that explains itself."""
    assert response.status_code not in (500, 502), response.text
    if response.status_code >= 400:
        problem = response.json()
        assert problem["type"].startswith("urn:tidebook:error:"), problem
        assert problem["status"] == response.status_code
        assert len(problem["detail"]) > 10
        assert "Traceback" not in response.text


#: One method without a route is enough to test the answer to such methods.
CONFIG = schemathesis.Config.from_dict({"phases": {"coverage": {"unexpected-methods": ["trace"]}}})
SCHEMA = schemathesis.openapi.from_dict(document("0"), config=CONFIG).exclude(operation_id=sorted(LEFT_OUT))
#: The most requests to each operation: its boundary values first, then random ones.
EXAMPLES_MAX = 6
REQUESTS_MAX = 40
REQUESTS: dict[str, Iterator[int]] = defaultdict(lambda: count(1))


@SCHEMA.parametrize()
@settings(max_examples=EXAMPLES_MAX, deadline=None, suppress_health_check=list(HealthCheck))
def test_requests_allowed_or_forbidden_by_the_document_never_get_a_500(case: Any, http: httpx.Client) -> None:
    if next(REQUESTS[case.operation.label]) > REQUESTS_MAX:
        return
    query = {**(case.query or {})}
    if "follow" in query:
        query["follow"] = "false"  # a followed stream never ends
    headers = {name: value for name, value in (case.headers or {}).items() if _sendable(name, value)}
    headers |= {"request-timeout": str(REQUEST_S), **AUTHORIZATION}
    body = None if case.body is schemathesis.core.NOT_SET else case.body
    path = case.formatted_path
    try:
        request = http.build_request(case.method, path, params=query, json=body, headers=headers)
    except (httpx.InvalidURL, ValueError, TypeError):
        return  # no client can send it
    check(http.send(request))


def _sendable(name: str, value: object) -> bool:
    text = str(value)
    return (
        text.isascii()
        and text.isprintable()
        and name.lower() not in {"authorization", "content-length", "cookie", "host"}
    )


PATHS = sorted({(route.method, route.path) for route in ROUTES if route.name not in LEFT_OUT})
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(
    route=st.sampled_from(PATHS),
    body=st.binary(max_size=200) | JSON.map(lambda value: httpx.Request("POST", "http://x", json=value).content),
    query=st.dictionaries(st.sampled_from(["start", "limit", "follow", "x"]), st.sampled_from(["0", "-1", "x", ""])),
    kind=st.sampled_from(["application/json", "text/plain", "application/json; charset=utf-8", ""]),
    segment=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12),
)
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_body_path_and_query_gets_an_answer(
    http: httpx.Client, route: tuple[str, str], body: bytes, query: dict[str, str], kind: str, segment: str
) -> None:
    method, path = route
    parts = [quote(segment, safe="") if part.startswith("{") else part for part in path.split("/")]
    headers = {"content-type": kind, "request-timeout": str(REQUEST_S), **AUTHORIZATION}
    check(http.request(method, "/".join(parts), content=body, params=query, headers=headers))


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /v1/journals/%ff%fe/x HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /v1/journals/orders/%00/events HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /v1/topics?%zz=%ff HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /v1/../../etc/passwd HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /v1//topics HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"BREW /v1/topics HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"POST /v1/journals/orders/a/events HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: 99999999999999999999\r\n\r\n",
        b"GET /v1/topics HTTP/1.1\r\nhost: localhost\r\nauthorization: Basic eA==\r\n\r\n",
        b"GET /v1/topics HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer \xff\xfe\r\n\r\n",
        b"GET /v1/topics HTTP/1.1\r\nhost: localhost\r\ncookie: tidebook_session=;;;=\r\n\r\n",
        b"POST /v1/topics HTTP/1.1\r\nhost: localhost\r\norigin: http://[\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
)
def test_a_malformed_request_gets_an_answer(url: str, raw: bytes) -> None:

    where = httpx.URL(url)
    with socket.create_connection((where.host, where.port or 80), timeout=20) as connection:
        connection.sendall(raw)
        status = connection.recv(65_536).split(b" ")[1]
    assert 400 <= int(status) < 500


@pytest.mark.parametrize("depth", [200, 5_000, 100_000])
def test_deep_nesting_is_refused(http: httpx.Client, depth: int) -> None:
    body = b'{"events":[{"payload":' + b"[" * depth + b"]" * depth + b"}]}"
    response = http.post("/v1/journals/orders/deep/events", content=body, headers=AUTHORIZATION | JSON_BODY)
    assert response.status_code == 400
    check(response)


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        (b"", "truncated"),
        (b"[]", "Expected `object`"),
        (b"{}", "missing required field `events`"),
        (b'{"events":[]}', "length >= 1"),
        (b'{"events":[{}]}', "set payload"),
        (b'{"events":[{"payload":1,"payload_base64":"aGk="}]}', "not both"),
        (b'{"events":[{"payload_base64":"!"}]}', "base64"),
        (b'{"events":[{"payload":123456789012345678901234567890}]}', "64 bits"),
        (b'{"events":[{"payload":1e999}]}', "out of range"),
        (b'{"events":[{"payload":"\\ud800"}]}', "truncated"),
        (b'{"events":[{"payload":1,"tag":"x"}]}', "unknown field `tag`"),
        (b'{"events":[{"payload":1}],"expected":-1}', "`int` >= 0"),
        (b'{"events":[{"payload":1}],"expected":0,"at":1}', "not both"),
    ],
)
def test_an_answer_says_what_is_wrong(http: httpx.Client, body: bytes, hint: str) -> None:
    response = http.post("/v1/journals/orders/bad/events", content=body, headers=AUTHORIZATION | JSON_BODY)
    check(response)
    assert response.status_code == 400
    assert hint in response.json()["detail"]
