"""Jobs of the pipeline run to their result, over HTTP and on the pages of the console."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.server.running import client, served
from tidebook import Event
from tidebook.sqlite.checksums import connect

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


async def _ended(http: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """Start a job and return its state when it has ended."""
    started = await http.post("/v1/pipeline/jobs", json=body)
    assert started.status_code < 300, started.text
    job: dict[str, Any] = started.json()
    for _ in range(1_000):
        if job["state"] != "running":
            break
        await asyncio.sleep(0.2)
        job = (await http.get(f"/v1/pipeline/jobs/{job['id']}")).json()
    return job


async def _ended_on_its_page(http: httpx.AsyncClient, **fields: str) -> tuple[dict[str, Any], str]:
    """Start a job from the console, and return its data and its page when it has ended."""
    started = await http.post("/acts/pipeline.start", data=fields)
    assert started.status_code == 303, started.text
    at = started.headers["location"]
    data: dict[str, Any] = {"job": {"state": "running"}}
    for _ in range(1_000):
        data = (await http.get(at.replace("/job?", "/job.json?"))).json()
        if data["job"]["state"] != "running":
            break
        await asyncio.sleep(0.2)
    return data, (await http.get(at)).text


async def test_differences_are_shown_and_repaired_and_an_export_runs_to_its_result(tmp_path: Path) -> None:
    (tmp_path / "tidebook.toml").write_text(f'folder = "book"\n[server]\nexport_folder = "{tmp_path / "exports"}"\n')
    async with served(tmp_path / "tidebook.toml") as (url, book), client(url) as http:
        await book.journal("orders").append("o-1", [Event({"n": 1}, tags={"paid"}), Event({"n": 2})])
        await book.settle()
        store = connect(tmp_path / "book" / "store.db")
        store.execute("DELETE FROM journal WHERE id = 'o-1' AND seq_nr = 2")
        store.close()
        found, page = await _ended_on_its_page(http, kind="verify", topics="orders", count="1")
        assert found["job"]["state"] == "differences"
        (difference,) = found["differences"]
        assert (difference["what"], difference["id"], difference["seq_nr"]) == ("event missing", "o-1", 2)
        repair = "/acts/pipeline.start?back="
        assert (repair in page, "repair=true" in page, "event missing" in page) == (True, True, True)
        fields = {"kind": "verify", "topics": "orders", "repair": "true", "count": "1"}
        assert (await http.post("/acts/pipeline.start", data=fields)).status_code == 409  # without the typed word
        repaired, _ = await _ended_on_its_page(http, **fields, confirm="verify")
        assert (repaired["job"]["state"], repaired["job"]["result"]["repaired"]) == ("done", 1)
        assert [event.payload async for event in book.journal("orders").read("o-1")] == [{"n": 1}, {"n": 2}]
        exported = await _ended(http, {"kind": "export", "topics": ["orders"], "to": "orders"})
        assert (exported["state"], exported["error"]) == ("done", None)
        assert list((tmp_path / "exports").rglob("*.parquet"))
