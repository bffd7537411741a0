"""`format("tidebook")` over Spark Connect: a client without a JVM, whose server is the session of the other tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.connect_client import WRONG
from tests.pipeline.one_frame import EVENTS, IDS, expected_rows
from tests.pipeline.workloads import replicate_here
from tidebook.core.event import Event
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wiring.book import Book

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]


def test_a_connect_client_reads_tables_several_queries_over_one_frame_and_streams(
    embedded: Book, portal: BlockingPortal, tmp_path: Path, connect_url: str
) -> None:
    for id in IDS:
        portal.run(embedded.journal("orders").append(id, [Event({"step": i}) for i in range(EVENTS - 1)]))
    portal.run(replicate_here(embedded, embedded.store, "orders"))
    for id in IDS:
        portal.run(embedded.journal("orders").append(id, [Event({"step": "not replicated"})]))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_GATEWAY")}
    folder, checkpoint = str(embedded.settings.folder), str(tmp_path / "c")
    client = [sys.executable, "-m", "tests.pipeline.connect_client", connect_url, folder, checkpoint]
    done = subprocess.run(client, cwd=ROOT, env=environment, capture_output=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    found = json.loads(done.stdout.decode().splitlines()[-1])
    everything = [[id, number] for id in IDS for number in range(1, EVENTS + 1)]
    replicated = [[id, number] for id in IDS for number in range(1, EVENTS)]
    assert found["table"] == found["own"] == everything
    assert found["stream"] == replicated
    queries = {name: [list(row) for row in rows] for name, rows in expected_rows().items()}
    assert found["queries"] == {"false": queries, "true": queries}
    errors = [[line.strip() for line in error.splitlines() if line.strip()] for error in found["errors"]]
    assert [more for _, *more in errors] == [["SQLSTATE: 38000"]] * len(WRONG)
    messages = (
        "one of log, store, not 'now'",
        "there is no book in /nowhere",
        "topic oders is not",
        "did you mean topic?",
    )
    for (first, *_), message in zip(errors, messages, strict=True):
        assert message in first
