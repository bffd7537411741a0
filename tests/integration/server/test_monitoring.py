"""The metrics, logs and history of a server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import tidebook
from tests.integration.server.conftest import CreateToken
from tests.integration.server.running import client, served, served_book
from tidebook.runtime.metrics import COUNTERS, DURATIONS, GAUGES
from tidebook.server.database import ServerDatabase
from tidebook.server.history import SERIES, History


async def test_metrics_count_requests_by_route_and_status(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        body = {"events": [{"payload": 1}]}
        assert (await http.post("/v1/journals/orders/o-1/events", json=body)).status_code == 200
        assert (await http.post("/v1/journals/orders/o-1/events", json={"events": 1})).status_code == 400
        assert (await http.get("/v1/nothing")).status_code == 404
        found = await http.get("/metrics")
        counted = book.metrics.counted
        assert counted("server_requests", route="journals.append", status=200) == 1
        assert counted("server_requests", route="journals.append", status=400) == 1
        assert counted("server_requests", route="none", status=404) == 1
        assert book.metrics.timing("server_request", route="journals.append").count == 2
    assert found.headers["content-type"].startswith("text/plain; version=")
    assert 'tidebook_server_requests_total{route="journals.append",status="200"} 1.0' in found.text
    assert 'tidebook_server_request_seconds_count{route="journals.append"} 2.0' in found.text


async def test_metrics_have_their_content_type_before_there_are_any(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        assert (await http.get("/metrics")).headers["content-type"].startswith("text/plain; version=")


async def test_metrics_count_open_streams(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        follow = {"accept": "text/event-stream"}
        async with http.stream("GET", "/v1/queues/mail/due", headers=follow) as response:
            assert response.status_code == 200
            assert "tidebook_server_open_streams 1.0" in (await http.get("/metrics")).text


async def test_metrics_need_the_role_viewer(tmp_path: Path, create_token: CreateToken) -> None:
    token = (await create_token("viewer")).token
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        assert (await http.get("/metrics")).status_code == 401
        assert (await http.get("/metrics", headers={"authorization": f"Bearer {token}"})).status_code == 200


def test_logs_are_json_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tidebook.cli", "serve", "--log-json", "--host", "192.0.2.1", "--port", "1"]
    ended = subprocess.run([*command, "--book", str(tmp_path / "book")], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    [line] = [json.loads(each) for each in ended.stderr.splitlines()]
    assert (line["level"], line["logger"]) == ("error", "tidebook.cli")
    assert "192.0.2.1 is reached by others" in line["message"]


async def test_the_history_is_a_ring_of_samples_that_survives_a_restart(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path / "book", create=True) as book:
        await book.journal("orders").append("o-1", [tidebook.Event(1)])
        database = ServerDatabase(book.settings.folder)
        history = History(book, database)
        assert history.read(0) == []
        await history.sample()
        await history.sample()
        await database.close()
        async with served_book(book) as url, client(url) as http:
            found = (await http.get("/v1/history")).json()
            newest_ms = found["samples"][-1]["at_ms"]
            later = (await http.get("/v1/history", params={"since_ms": newest_ms})).json()
    assert 1 <= len(found["samples"]) <= 2  # those of one interval share a slot
    values = dict(zip(found["names"], found["samples"][-1]["values"], strict=True))
    assert values["pipeline_lag_records"] == 1
    assert values["sqlite_operations_total"] >= 1
    assert values["queue_put_total"] is None
    assert found["every_s"] == 10
    assert later["samples"] == []


def test_every_series_of_the_history_is_exported() -> None:
    exported = {f"{name}_total" for name in COUNTERS} | set(GAUGES)
    exported |= {f"{name}_seconds_{suffix}" for name in DURATIONS for suffix in ("count", "sum")}
    assert set(SERIES) <= exported
