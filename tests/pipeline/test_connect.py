"""`format("tidebook")` over Spark Connect: a client that has no JVM of its own, and a server of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.workloads import replicate_here
from tidebook.core.event import Event
from tidebook.core.portal import Portal
from tidebook.wiring.book import Book

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[2]


def test_a_connect_client_reads_tables_filters_and_streams(embedded: Book, portal: Portal, tmp_path: Path) -> None:
    for id in ("a", "b"):
        portal.run(embedded.journal("orders").append(id, [Event({"step": i}) for i in range(5)]))
    portal.run(replicate_here(embedded, embedded.store, "orders"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_GATEWAY")}
    environment |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    client = [sys.executable, "-m", "tests.pipeline.connect_client", str(embedded.settings.folder), str(tmp_path / "c")]
    done = subprocess.run(client, cwd=ROOT, env=environment, capture_output=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    found = json.loads(done.stdout.decode().splitlines()[-1])
    everything = [[id, number] for id in ("a", "b") for number in range(1, 6)]
    assert found == {"table": everything, "filtered": [["b", 4], ["b", 5]], "stream": everything}
