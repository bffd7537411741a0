"""The jobs on a real standalone cluster: a master and two workers on loopback, to which the package is shipped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import QUICK_SPARK
from tests.docs.printed_page import clone, run_page
from tests.pipeline import faults
from tests.pipeline.commands import descendants, free_port, processes_with
from tests.pipeline.conftest import OpenBook, opened
from tests.pipeline.test_faults import assert_as_expected
from tests.pipeline.test_leases import await_replicated, until
from tests.pipeline.workloads import expected_rows, rows_of, write_history
from tidebook.pipeline.jars import kafka_source_jars
from tidebook.pipeline.submit import job
from tidebook.runtime.blocking_portal import BlockingPortal
from tools.build import build_archives

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.cassandra, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
START_S = 120
#: The longest wait of a test: an executor takes seconds to start, and longer on a busy machine.
CASE_TIMEOUT_S = 240


def spark_home() -> Path:
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


class Cluster:
    """Spark's own daemons, started as plain processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._suspended: list[int] = []
        self.url = f"spark://127.0.0.1:{free_port()}"

    def start(self) -> None:
        host, port = self.url.removeprefix("spark://").split(":")
        self._daemon("org.apache.spark.deploy.master.Master", "--host", host, "--port", port, "--webui-port", "0")
        self._await("master", "I have been elected leader")
        for n in range(2):
            self._daemon(
                "org.apache.spark.deploy.worker.Worker", "--host", host, "--webui-port", "0", "--cores", "1",
                "--memory", "1g", "--work-dir", str(self.folder / f"work-{n}"), self.url,
            )  # fmt: skip
        for n in (1, 2):
            self._await(f"{n}", "Successfully registered with master")

    def _daemon(self, name: str, *arguments: str) -> None:
        home = spark_home()
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH",)}
        environment |= {"SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
        environment |= {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": QUICK_SPARK}
        command = [str(home / "bin" / "spark-class"), name, *arguments]
        with (self.folder / f"{len(self._processes) or 'master'}.log").open("wb") as log:
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))

    def _await(self, name: str, text: str) -> None:
        deadline = time.monotonic() + START_S
        log = self.folder / f"{name}.log"
        while text not in log.read_text(errors="replace"):
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-2000:]
            time.sleep(0.2)

    def executors(self) -> list[int]:
        """Return the running executors: Spark's workers start each of them in a separate folder."""
        return [pid for pid in processes_with("CoarseGrainedExecutorBackend") if _works_in(pid, self.folder)]

    def is_served_by_all(self) -> bool:
        """Return whether both executors have a Python worker, which shows that they have served a lease."""
        running = self.executors()
        daemons = [descendants(pid).keys() & set(processes_with("pyspark.daemon")) for pid in running]
        return len(running) == 2 and all(len(each) > 1 for each in daemons)  # the daemon and its forked workers

    def suspend_machine(self) -> None:
        """Stop a worker daemon and its processes, as if its machine had lost the network.

        Nothing closes a connection, so that only missing heartbeats show the loss.
        """
        work = self.folder / "work-1"
        backends = [pid for pid in processes_with("CoarseGrainedExecutorBackend") if _works_in(pid, work)]
        assert backends
        stopped = [self._processes[-1].pid, *(pid for each in backends for pid in descendants(each))]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        self._suspended = stopped

    def resume_machine(self) -> None:
        """Continue the processes that `suspend_machine` stopped and that still exist."""
        for pid in self._suspended:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._suspended = []

    def stop(self) -> None:
        self.resume_machine()
        for process in reversed(self._processes):
            process.terminate()
            process.wait(60)


def _works_in(pid: int, folder: Path) -> bool:
    try:
        return Path(f"/proc/{pid}/cwd").resolve().is_relative_to(folder.resolve())
    except OSError:
        return False


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start one cluster for all tests of this module."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Build the package as an archive, marked so that a worker can report where it was imported from."""
    archive = tmp_path / "tidebook-shipped.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for file in (ROOT / "src" / "tidebook").rglob("*.py"):
            packed.write(file, file.relative_to(ROOT / "src"))
    return archive


def submitted(cluster: Cluster, package: Path, script: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Run `spark-submit` with a script, as documented."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_GATEWAY")}
    environment |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_HOME": str(spark_home())}
    conf = ["spark.driver.host=127.0.0.1", "spark.executor.memory=512m", "spark.executor.cores=1", "spark.cores.max=2"]
    conf.append(f"spark.executor.extraJavaOptions={QUICK_SPARK}")
    command = [
        *(str(spark_home() / "bin" / "spark-submit"), "--master", cluster.url),
        *(part for each in conf for part in ("--conf", each)),
        *("--jars", ",".join(map(str, kafka_source_jars())), "--py-files", str(package)),
        *(script, *arguments),
    ]
    with (cluster.folder / "submit.log").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log)


def test_a_cluster_replicates_with_the_shipped_package_although_an_executor_is_killed(
    cluster: Cluster, package: Path, servers_toml: Path, portal: BlockingPortal, topic: str, open_book: OpenBook
) -> None:
    # Many micro-batches, so that there is one to kill an executor in.
    servers_toml.write_text(
        f"{servers_toml.read_text()}[pipeline]\nrecords_max = 20\nlook_every_s = 0.1\ncatch_up_records = 0\n"
    )
    with opened(portal, servers_toml) as book:
        portal.run(write_history(book, topic, steps=60))
        arguments = ("--once", "--json", "--topic", topic, "--book", str(servers_toml))
        process = submitted(cluster, package, job.__file__, "pipeline", "replicate", *arguments)
        assert process.stdout is not None
        killed: list[int] = []
        last: dict[str, Any] = {}
        for line in process.stdout:
            if line.startswith(b"{"):
                last = json.loads(line)
                if not killed and last["batches"] > 0 and last["lag"] > 0:
                    killed = cluster.executors()[:1]
                    os.kill(killed[0], signal.SIGKILL)
        process.stdout.close()
        assert process.wait(60) == 0, (cluster.folder / "submit.log").read_text(errors="replace")[-3000:]
        assert killed
        assert (last["done"], last["lag"]) == (True, 0)
        found = portal.run(rows_of(book.store, topic))
        expected = portal.run(expected_rows(book, open_book("fresh"), topic))
        assert (found["heads"], found["events"]) == (expected["heads"], expected["events"])
    shipped = [file for work in (0, 1) for file in (cluster.folder / f"work-{work}").rglob("tidebook-shipped.zip")]
    assert len(shipped) >= 2, "an executor was not given the archive"


def test_the_last_page_of_the_tutorial_runs(cluster: Cluster, servers_toml: Path, tmp_path: Path) -> None:
    status = json.dumps({"servers": {"spark": {"url": cluster.url}}})
    folder = clone(tmp_path / "clone", status=status)
    (folder / "dist").mkdir()
    build_archives(folder / "dist", python=Path(sys.executable))
    (folder / ".servers" / "cluster").mkdir(parents=True)
    servers_toml.rename(folder / ".servers" / "cluster" / "tidebook.toml")
    run_page(ROOT / "docs" / "tutorial" / "cluster.md", folder)
    assert [*(folder / "totals").glob("*.parquet")]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("lease_s", [600, pytest.param(3, marks=pytest.mark.long)])
def test_a_cluster_that_loses_an_executor_and_later_a_machine_takes_over_their_leases(
    cluster: Cluster,
    package: Path,
    servers_toml: Path,
    portal: BlockingPortal,
    topic: str,
    tmp_path: Path,
    open_book: OpenBook,
    long_form: bool,
    lease_s: int,
) -> None:
    """An executor is killed within a slice; then a machine disappears from the network, and returns later.

    Long leases are taken over when Spark reports the loss, long before they end; short ones when they end.
    """
    heartbeats = "".join(
        f'"{name}" = "{value}", '
        for name, value in {
            "spark.executor.heartbeatInterval": "1s",
            # A busy machine may delay heartbeats for ten seconds.
            "spark.storage.blockManagerHeartbeatTimeoutMs": f"{20 if lease_s > CASE_TIMEOUT_S else 300}s",
            "spark.network.timeoutInterval": "1s",
        }.items()
    )
    settings = f"[pipeline]\nlease_s = {lease_s}\nlook_every_s = 0.5\nspark = {{ {heartbeats[:-2]} }}\n"
    servers_toml.write_text(servers_toml.read_text() + settings)
    kills = tmp_path / "kills"
    kills.mkdir()
    rounds = ("1", "2", "3", "5", "9") if long_form else ("2",)
    with opened(portal, servers_toml) as book:
        portal.run(write_history(book, topic, steps=40))
        arguments = (str(servers_toml), topic, "executor", str(kills), *rounds)
        process = submitted(cluster, package, faults.__file__, *arguments)
        assert process.stdout is not None
        try:
            await_replicated(
                book, portal, topic, within_s=CASE_TIMEOUT_S * len(rounds)
            )  # an executor starts after each
            assert [*kills.iterdir()]
            until(cluster.is_served_by_all, "an executor was not replaced", CASE_TIMEOUT_S)
            cluster.suspend_machine()
            portal.run(write_history(book, topic, steps=40, seed=2))
            await_replicated(book, portal, topic, within_s=CASE_TIMEOUT_S)
            cluster.resume_machine()
            portal.run(write_history(book, topic, steps=40, seed=3))
            await_replicated(book, portal, topic, within_s=CASE_TIMEOUT_S)
            assert process.poll() is None
        finally:
            process.terminate()  # the JVM, which ends its Python
            process.wait(60)
            process.stdout.close()
        assert_as_expected(book, portal, topic, open_book)
