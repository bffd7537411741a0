"""Jobs of the pipeline run to their result over HTTP; the console runs them in `tests/browser/test_jobs.py`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.server.running import client, served
from tidebook import Event

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


async def _ended(http: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """Start a job, and return its state once it has ended."""
    started = await http.post("/v1/pipeline/jobs", json=body)
    assert started.status_code < 300, started.text
    job: dict[str, Any] = started.json()
    for _ in range(1_000):
        if job["state"] != "running":
            break
        await asyncio.sleep(0.2)
        job = (await http.get(f"/v1/pipeline/jobs/{job['id']}")).json()
    return job


async def test_an_export_runs_to_its_result_and_a_repair_needs_the_typed_word(tmp_path: Path) -> None:
    (tmp_path / "tidebook.toml").write_text(f'folder = "book"\n[server]\nexport_folder = "{tmp_path / "exports"}"\n')
    async with served(tmp_path / "tidebook.toml") as (url, book), client(url) as http:
        await book.journal("orders").append("o-1", [Event({"n": 1}, tags={"paid"}), Event({"n": 2})])
        await book.settle()
        fields = {"kind": "verify", "topics": "orders", "repair": "true", "count": "1"}
        assert (await http.post("/acts/pipeline.start", data=fields)).status_code == 409
        exported = await _ended(http, {"kind": "export", "topics": ["orders"], "to": "orders"})
        assert (exported["state"], exported["error"]) == ("done", None)
        assert list((tmp_path / "exports").rglob("*.parquet"))
