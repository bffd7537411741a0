"""A local Spark loads its classes from the JVM class archive (AppCDS) as soon as one has been written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
START = """
from pathlib import Path
from tidebook.pipeline.session import job_context
from tidebook.wiring.settings import read_settings
context = job_context("test", read_settings("book"))
assert context.parallelize([1, 2], 1).map(str).collect() == ["1", "2"]
"""
LOADED_FROM_ARCHIVE = "source: shared objects file (top)"


def test_the_next_start_loads_spark_from_the_archive(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_GATEWAY")}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    before = loaded(tmp_path, environment)
    assert LOADED_FROM_ARCHIVE not in before
    assert "org.apache.spark.SparkContext source: file" in before
    command = [sys.executable, "-m", "tidebook.pipeline.class_archive", ""]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE) as writer:
        assert writer.wait(600) == 0
    assert [file.suffix for file in sorted((tmp_path / "cache" / "tidebook" / "classes").iterdir())] == [
        ".jsa",
        ".lock",
    ]
    assert f"org.apache.spark.SparkContext {LOADED_FROM_ARCHIVE}" in loaded(tmp_path, environment)


def loaded(folder: Path, environment: dict[str, str]) -> str:
    """Start a context and run a Python job; return Java's log of the classes that it loaded, each with its source."""
    log = folder / "classes.log"
    log.unlink(missing_ok=True)
    quick = environment.get("SPARK_SUBMIT_OPTS", "")
    more = {"SPARK_SUBMIT_OPTS": f"{quick} -Xlog:class+load:file={log}"}
    done = subprocess.run(
        [sys.executable, "-c", START],
        cwd=folder,
        env={**environment, **more},
        capture_output=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return log.read_text()
