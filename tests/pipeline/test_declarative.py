"""The template of a Declarative Pipeline, run by Spark's own command on an embedded book."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from tests.pipeline.workloads import replicate_here
from tidebook.core.event import Event
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wiring.book import Book

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "examples" / "declarative_pipeline"


def run(spec: Path, warehouse: Path, remote: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_GATEWAY")}
    environment |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": str(ROOT / "src")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    command = ["spark-pipelines", "run", "--spec", str(spec), "--remote", remote]
    if remote.startswith("local"):
        command += ["--conf", f"spark.sql.warehouse.dir={warehouse}"]
    done = subprocess.run(command, cwd=spec.parent, env=environment, capture_output=True, timeout=360, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()[-3000:]


def rows(warehouse: Path, table: str) -> list[dict[str, Any]]:
    return [row for file in (warehouse / table).glob("*.parquet") for row in pq.read_table(file).to_pylist()]


def test_the_template_runs_on_a_book(
    spark: SparkSession, embedded: Book, portal: BlockingPortal, tmp_path: Path, connect_url: str, long_form: bool
) -> None:
    """It runs on the Connect server of the other tests; in the long form on one that the command starts."""
    for n in range(9):
        portal.run(embedded.journal("orders").append(f"o-{n % 3}", [Event({"n": n})]))
    portal.run(replicate_here(embedded, embedded.store, "orders"))
    portal.run(embedded.journal("orders").append("o-1", [Event({"n": 9})]))  # not replicated yet
    project = tmp_path / "project"
    warehouse = (
        tmp_path / "warehouse"
        if long_form
        else Path(str(spark.conf.get("spark.sql.warehouse.dir")).removeprefix("file:"))
    )
    shutil.copytree(TEMPLATE, project)
    spec = project / "spark-pipeline.yml"
    text = spec.read_text()
    for there, here in {
        "file:///tmp/tidebook-pipeline": f"file://{tmp_path}/storage",
        "/srv/tidebook-data": str(embedded.settings.folder),
    }.items():
        assert there in text
        text = text.replace(there, here)
    spec.write_text(text)
    run(spec, warehouse, "local[2]" if long_form else connect_url)
    found = sorted((row["id"], row["events"], row["last_seq_nr"]) for row in rows(warehouse, "journals"))
    assert found == [("o-0", 3, 3), ("o-1", 4, 4), ("o-2", 3, 3)]
    assert rows(warehouse, "totals") == [{"journals": 3, "events": 10}]
    assert sorted(row["payload"] for row in rows(warehouse, "events")) == [f'{{"n":{n}}}' for n in range(9)]
