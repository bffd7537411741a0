"""The same jobs on a real standalone cluster: a master and two workers on loopback, the package shipped to them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.pipeline.conftest import OpenBook, opened
from tests.pipeline.workloads import expected_rows, rows_of, write_history
from tidebook.core.portal import Portal
from tidebook.pipeline.jars import kafka_source_jars
from tidebook.pipeline.submit import job

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.cassandra, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
START_S = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def spark_home() -> Path:
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


class Cluster:
    """Spark's own daemons, as plain processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self.url = f"spark://127.0.0.1:{free_port()}"

    def start(self) -> None:
        host, port = self.url.removeprefix("spark://").split(":")
        self._daemon("org.apache.spark.deploy.master.Master", "--host", host, "--port", port, "--webui-port", "0")
        self._await("master", "I have been elected leader")
        for n in range(2):
            self._daemon(
                "org.apache.spark.deploy.worker.Worker", "--host", host, "--webui-port", "0", "--cores", "1",
                "--memory", "1g", "--work-dir", str(self._folder / f"work-{n}"), self.url,
            )  # fmt: skip
        for n in (1, 2):
            self._await(f"{n}", "Successfully registered with master")

    def _daemon(self, name: str, *arguments: str) -> None:
        home = spark_home()
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH",)}
        environment |= {"SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
        environment["SPARK_DAEMON_MEMORY"] = "256m"
        command = [str(home / "bin" / "spark-class"), name, *arguments]
        with (self._folder / f"{len(self._processes) or 'master'}.log").open("wb") as log:
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))

    def _await(self, name: str, text: str) -> None:
        deadline = time.monotonic() + START_S
        log = self._folder / f"{name}.log"
        while text not in log.read_text(errors="replace"):
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-2000:]
            time.sleep(0.2)

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            process.wait(60)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    folder = tmp_path / "cluster"
    folder.mkdir()
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package as an archive, marked so that a worker can tell where it has it from."""
    archive = tmp_path / "tidebook-shipped.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for file in (ROOT / "src" / "tidebook").rglob("*.py"):
            packed.write(file, file.relative_to(ROOT / "src"))
    return archive


def test_a_cluster_replicates_with_the_shipped_package(
    cluster: Cluster,
    package: Path,
    servers_toml: Path,
    portal: Portal,
    topic: str,
    open_book: OpenBook,
) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_GATEWAY")}
    environment |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_HOME": str(spark_home())}
    conf = ("spark.driver.host=127.0.0.1", "spark.executor.memory=512m", "spark.executor.cores=1", "spark.cores.max=2")
    with opened(portal, servers_toml) as book:
        portal.run(write_history(book, topic, steps=100))
        done = subprocess.run(
            [
                *(str(spark_home() / "bin" / "spark-submit"), "--master", cluster.url),
                *(part for each in conf for part in ("--conf", each)),
                *("--jars", ",".join(map(str, kafka_source_jars())), "--py-files", str(package)),
                *(job.__file__, "pipeline", "replicate", "--once", "--json", "--topic", topic),
                *("--book", str(servers_toml)),
            ],
            cwd=ROOT, env=environment, capture_output=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr.decode()[-3000:]
        [*_, last] = [json.loads(line) for line in done.stdout.decode().splitlines() if line.startswith("{")]
        assert (last["done"], last["lag"]) == (True, 0)
        found = portal.run(rows_of(book.store, topic))
        expected = portal.run(expected_rows(book, open_book("fresh"), topic))
        assert (found["heads"], found["events"]) == (expected["heads"], expected["events"])
    shipped = [file for work in (0, 1) for file in (cluster._folder / f"work-{work}").rglob("tidebook-shipped.zip")]
    assert len(shipped) == 2, "each executor was given the archive"
