"""The pipeline's commands: exit codes, lines of JSON, signals, and `tidebook up`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.request import urlopen

import pytest
from pyarrow import parquet

from tests.pipeline.commands import Forwarder, descendants, free_port, processes_with, running
from tests.pipeline.conftest import OpenBook, opened
from tests.pipeline.test_faults import assert_as_expected
from tests.pipeline.test_leases import until
from tests.pipeline.test_verify import damage
from tests.pipeline.workloads import newer_record, replicate_here, write_garbage, write_history
from tidebook.cli.app import main
from tidebook.core.event import Event
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wiring.book import Book

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

#: The longest time that `tidebook up` takes to end on an idle machine.
STOP_S = 2.0
WITHOUT_PYSPARK = "import sys; sys.modules['pyspark'] = None; from tidebook.cli.app import main; main()"


class Answered(NamedTuple):
    code: int
    rows: list[dict[str, Any]]
    err: str


Cli = Callable[..., Answered]


@pytest.fixture
def cli(
    spark: SparkSession, embedded: Book, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Cli]:
    """Return the `tidebook` command, run in this process on the tests' own Spark session, which it must not stop."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for each in (spark, spark.sparkContext):
        monkeypatch.setattr(each, "stop", lambda: None)

    def run(*arguments: str) -> Answered:
        monkeypatch.setattr(sys, "argv", ["tidebook", *arguments, "--json", "--book", str(embedded.settings.folder)])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capsys.readouterr()
        code = exit_.value.code
        assert isinstance(code, int | None)
        return Answered(code or 0, [json.loads(line) for line in out.splitlines() if line.startswith("{")], err)

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_running_replication_reports_its_progress_and_ends_cleanly_on_request(
    embedded: Book, portal: BlockingPortal, topic: str
) -> None:
    portal.run(write_history(embedded, topic, steps=40))
    folder, port = str(embedded.settings.folder), free_port()
    options = ("--engine", "spark", "--json", "--metrics", f"127.0.0.1:{port}")
    with running("pipeline", "replicate", *options, "--book", folder) as command:
        first = command.until(lambda row: row["records"] > 0 and row["lag"] == 0)
        assert {"records", "records_per_s", "batch_s", "parked", "waiting", "stopped"} <= first.keys()
        portal.run(embedded.journal(topic).append("late", [Event(1)]))
        # The rate is measured between two reports.
        command.until(lambda row: row["records"] > first["records"] and row["lag"] == 0 and row["records_per_s"] > 0)
        with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            reported = answer.read().decode()
        for name in ("lag_records", "lag_seconds", "records_per_second", "stopped_partitions"):
            assert f"tidebook_pipeline_{name}" in reported
        code, rows = command.end()
    assert code == 0
    partitions = portal.run(embedded.journal(topic).topic_config()).partitions
    assert rows[-1]["done"]
    assert rows[-1]["lag"] in {0, partitions}  # a tick in each partition may follow the last batch


def test_status_reports_the_lag_in_records_and_seconds_and_the_parked_records(
    cli: Cli, embedded: Book, portal: BlockingPortal, topic: str
) -> None:
    portal.run(embedded.journal(topic).append("o-1", [Event(1)]))
    portal.run(write_garbage(embedded, topic))
    before = cli("pipeline", "status")
    assert sum(row.get("lag", 0) for row in before.rows) == 2
    assert sum(row.get("lag_s", 0) for row in before.rows) > 0
    assert cli("pipeline", "replicate", "--once", "--engine", "spark").code == 0
    *partitions, job = cli("pipeline", "status").rows
    assert [row["lag"] for row in partitions] == [0] * 4
    assert job["parked"] == 1
    assert job["job"]["records"] >= 2


def test_a_topic_that_was_never_written_has_exit_code_4(cli: Cli) -> None:
    """The exit code is not 0, because a misspelt name would otherwise look like success."""
    assert cli("pipeline", "status", "--topic", "nobody").code == 4
    assert cli("pipeline", "verify", "nobody").code == 4


def test_a_stopped_partition_has_exit_code_5_and_the_remedy(
    cli: Cli, embedded: Book, portal: BlockingPortal, topic: str
) -> None:
    portal.run(embedded.journal(topic).append("o-1", [Event(1)]))
    portal.run(write_garbage(embedded, topic, value=newer_record()))
    done = cli("pipeline", "replicate", "--once", "--engine", "spark")
    assert done.code == 5
    assert "is stopped" in done.err
    assert "upgrade" in done.err
    assert [row["stopped"] for row in cli("pipeline", "status").rows if row.get("stopped")]


def test_verify_reports_differences_as_rows_and_by_its_exit_code(
    cli: Cli, embedded: Book, portal: BlockingPortal, topic: str
) -> None:
    portal.run(write_history(embedded, topic, steps=40))
    portal.run(replicate_here(embedded, embedded.store, topic))
    damaged = portal.run(damage(embedded, topic))
    found = cli("pipeline", "verify", topic)
    assert found.code == 1
    *differences, summary = found.rows
    assert damaged.items() <= {(row["id"], row["what"]) for row in differences}
    assert summary["left"] == len(differences)
    # As with `rebuild`, a topic may be a positional argument; other topics are not compared.
    portal.run(embedded.journal("sound").append("o-1", [Event(1)]))
    portal.run(replicate_here(embedded, embedded.store, "sound"))
    sound = cli("pipeline", "verify", "sound")
    assert (sound.code, sound.rows[-1]["journals"]) == (0, 1)
    assert cli("pipeline", "verify", "--repair").code == 0
    assert cli("pipeline", "verify").code == 0


def test_up_on_spark_replicates_purges_expired_journals_and_leaves_no_process(
    tmp_path: Path, embedded: Book, portal: BlockingPortal
) -> None:
    folder = embedded.settings.folder
    toml = tmp_path / "up.toml"
    toml.write_text(f'folder = "{folder}"\n[pipeline]\nengine = "spark"\npurge_every_s = 0.5\nlook_every_s = 0.2\n')
    journal = embedded.journal("orders")
    portal.run(journal.append("stays", [Event(1)]))
    portal.run(journal.append("goes", [Event(1)], expire_after=timedelta(milliseconds=1)))
    with running("up", "--json", "--every-s", "0.2", "--book", str(toml)) as command:
        # Three records: two appends, and the purge of one journal, which must have been replicated first.
        command.until(
            lambda row: (
                bool(row.get("topics"))
                and row["replication"] == "running"
                and row["topics"][0]["records"] >= 3
                and row["topics"][0]["lag"] == 0
            )
        )
        assert portal.run(journal.pointer("goes")) is None
        assert portal.run(journal.pointer("stays")) == 1
        assert processes_with(f"--until-input-ends\0--json\0--book\0{toml}")
        code, err = command.interrupt()
    assert code == 130, err
    assert "Traceback" not in err
    assert not processes_with(f"--until-input-ends\0--json\0--book\0{toml}")


def test_up_on_spark_ends_two_seconds_after_a_signal_and_spark_ends_by_itself(
    tmp_path: Path, embedded: Book, portal: BlockingPortal
) -> None:
    toml = tmp_path / "up.toml"
    toml.write_text(f'folder = "{embedded.settings.folder}"\n[pipeline]\nengine = "spark"\nlook_every_s = 0.2\n')
    portal.run(embedded.journal("orders").append("o-1", [Event(1)]))
    with running("up", "--json", "--every-s", "0.2", "--book", str(toml)) as command:
        command.until(lambda row: bool(row.get("topics")) and row["topics"][0]["lag"] == 0)
        processes = descendants(command.process.pid)
        assert any("java" in Path(f"/proc/{pid}/comm").read_text() for pid in processes)
        before = slowdown()
        began_s = time.monotonic()
        code, _ = command.end()
        seconds = time.monotonic() - began_s
        slower = max(before, slowdown())
        assert code == 0
        assert seconds <= STOP_S * (1.0 if slower < 1.2 else 2 * slower), f"{seconds:.2f} s, slower by {slower:.1f}"
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes), "Spark did not end")


def slowdown() -> float:
    """Return the factor by which a process is slower now because others use the cores."""
    began_s = time.monotonic()
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", "import tidebook.cli.app"], os.environ)
    _, status, usage = os.wait4(pid, 0)
    assert status == 0
    return max(1.0, (time.monotonic() - began_s) / (usage.ru_utime + usage.ru_stime))


@pytest.mark.parametrize("missing", ["pyspark", "java"])
def test_up_on_spark_without_spark_reports_it_and_stays_open(tmp_path: Path, missing: str) -> None:
    code = WITHOUT_PYSPARK if missing == "pyspark" else "from tidebook.cli.app import main; main()"
    more = {} if missing == "pyspark" else {"JAVA_HOME": "", "PATH": str(tmp_path)}
    toml = tmp_path / "tidebook.toml"
    toml.write_text('[pipeline]\nengine = "spark"\n')
    with running("up", "--json", "--book", str(toml), code=code, **more) as command:
        row = command.until(lambda row: str(row.get("replication", "")).startswith("off"))
        assert {"pyspark": "pip install 'tidebook[spark]'", "java": "Java 17"}[missing] in row["replication"]
        assert command.end()[0] == 0


def test_flush_wal_writes_entries_and_removes_them_from_the_log(
    cli: Cli, embedded: Book, portal: BlockingPortal, tmp_path: Path
) -> None:
    wal = embedded.wal("metrics")
    region = portal.run(wal.open_region(7, create=True))
    portal.run(region.write(1, [b"a", "b"]))
    portal.run(wal.close())  # one process writes at a time
    done = cli("pipeline", "flush-wal", "metrics", "--to", str(tmp_path / "out"))
    assert (done.code, done.rows[-1]["entries"]) == (0, 2)
    (file,) = (tmp_path / "out" / "region=7" / "table=1").glob("*.parquet")
    assert parquet.read_table(file).column("payload").to_pylist() == [b"a", b"b"]
    left = portal.run(embedded.wal("metrics").open_region(7, writable=False))
    portal.run(left.refresh())
    assert left.meta.held_bytes == 0


def test_inline_replication_alongside_the_job_changes_nothing(
    cli: Cli, spark: SparkSession, embedded: Book, portal: BlockingPortal, open_book: OpenBook
) -> None:
    from tidebook.pipeline.jobs.replicate import Replication

    journal, seen = embedded.journal("orders"), threading.Event()
    portal.run(journal.append("o-0", [Event(0, tags={"paid"})]))
    job = Replication(spark, embedded, portal, report=lambda progress: seen.set() if progress.partitions else None)
    thread = threading.Thread(target=job.run)
    where = ("--json", "--book", str(embedded.settings.folder))
    with running("pipeline", "replicate", *where) as beside:
        thread.start()
        try:
            assert seen.wait(120)
            beside.until(lambda row: row["state"] == "active")
            for number in range(300):
                portal.run(journal.append(f"o-{number % 20}", [Event(number, tags={"paid"})]))
        finally:
            job.stop()
            thread.join(120)
        assert beside.end()[0] == 0
    assert cli("pipeline", "replicate", "--once").code == 0
    assert_as_expected(embedded, portal, "orders", open_book)
    status = cli("pipeline", "status")
    assert {row["lag"] for row in status.rows if "lag" in row} == {0}
    assert status.rows[-1]["job"]["engine"] in {"inline", "spark"}


@pytest.mark.kafka
@pytest.mark.cassandra
def test_replicate_waits_for_servers_that_are_down_when_it_starts_and_an_interrupt_ends_it_with_130(
    tmp_path: Path, kafka_bootstrap: str, cassandra_address: str, portal: BlockingPortal, topic: str
) -> None:
    """Each part is ready as soon as the wait for it returns."""

    def settings(name: str, kafka: str, cassandra: str) -> Path:
        file = tmp_path / name
        file.write_text(
            f'[log]\nurl = "kafka://{kafka}"\n[store]\nurl = "cassandra://{cassandra}/pipeline_tests"\n'
            "[journal]\nsegments = 8\npartitions = 1\n[pipeline]\nlook_every_s = 0.2\n"
        )
        return file

    with opened(portal, settings("up.toml", kafka_bootstrap, cassandra_address)) as book, ExitStack() as closing:
        portal.run(book.journal(topic).append("o-1", [Event(1)]))
        kafka, cassandra = Forwarder(kafka_bootstrap), Forwarder(cassandra_address)
        for each in (kafka, cassandra):
            closing.callback(each.close)
        toml = settings("down.toml", kafka.address, cassandra.address)
        with running("pipeline", "replicate", "--json", "--topic", topic, "--book", str(toml)) as command:
            down = {"Kafka": kafka, "Cassandra": cassandra}
            while down:
                waiting = command.until(lambda row: any(name in (row["waiting"] or "") for name in down))["waiting"]
                down.pop(next(name for name in down if name in waiting)).begin()
            command.until(lambda row: row["records"] > 0 and row["lag"] == 0)
            code, err = command.interrupt()
        assert code == 130, err
        assert "Traceback" not in err
        assert portal.run(book.store.heads(topic, ["o-1"])).keys() == {"o-1"}


def test_an_interrupt_ends_a_repeated_export_with_130(
    cli: Cli, tmp_path: Path, embedded: Book, portal: BlockingPortal, topic: str
) -> None:
    portal.run(embedded.journal(topic).append("o-1", [Event(1)]))
    portal.run(replicate_here(embedded, embedded.store, topic))
    lake = tmp_path / "lake"

    def interrupt() -> None:
        while not any(lake.rglob("*.parquet")):
            threading.Event().wait(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    done = cli("pipeline", "export", "--every-s", "0.1", "--to", str(lake))
    assert done.code == 130, done.err
    assert done.rows[0]["events"] == 1
    assert "Traceback" not in done.err
