"""The pipeline as its users meet it: commands, exit codes, lines of JSON, signals, and `tidebook up`."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.request import urlopen

import pytest

from tests.pipeline.commands import processes_with, running
from tests.pipeline.test_cluster import free_port
from tests.pipeline.test_verify import damage
from tests.pipeline.workloads import newer_record, replicate_here, write_garbage, write_history
from tidebook.cli.app import main
from tidebook.core.event import Event
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wiring.book import Book

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

WITHOUT_PYSPARK = "import sys; sys.modules['pyspark'] = None; from tidebook.cli.app import main; main()"


class Told(NamedTuple):
    code: int
    rows: list[dict[str, Any]]
    err: str


Cli = Callable[..., Told]


@pytest.fixture
def cli(
    spark: SparkSession, embedded: Book, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Cli]:
    """The `tidebook` command in this process, on the tests' own Spark session, which it may not stop."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(spark, "stop", lambda: None)

    def run(*arguments: str) -> Told:
        monkeypatch.setattr(sys, "argv", ["tidebook", *arguments, "--json", "--book", str(embedded.settings.folder)])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = capsys.readouterr()
        code = exit_.value.code
        assert isinstance(code, int | None)
        return Told(code or 0, [json.loads(line) for line in out.splitlines() if line.startswith("{")], err)

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_running_replication_tells_how_far_it_is_and_ends_well_when_asked_to(
    embedded: Book, portal: BlockingPortal, topic: str
) -> None:
    portal.run(write_history(embedded, topic, steps=40))
    folder, port = str(embedded.settings.folder), free_port()
    with running("pipeline", "replicate", "--json", "--metrics", f"127.0.0.1:{port}", "--book", folder) as command:
        first = command.until(lambda row: row["records"] > 0 and row["lag"] == 0)
        assert {"records", "records_per_s", "batch_s", "parked", "waiting", "stopped"} <= first.keys()
        portal.run(embedded.journal(topic).append("late", [Event(1)]))
        # The rate is that of the time between two looks.
        command.until(lambda row: row["records"] > first["records"] and row["lag"] == 0 and row["records_per_s"] > 0)
        with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            told = answer.read().decode()
        for name in ("lag_records", "lag_seconds", "records_per_second", "stopped_partitions"):
            assert f"tidebook_pipeline_{name}" in told
        code, rows = command.end()
    assert code == 0
    partitions = portal.run(embedded.journal(topic).topic_config()).partitions
    assert rows[-1]["done"]
    assert rows[-1]["lag"] in {0, partitions}  # a tick in each partition may follow the last batch


def test_status_tells_the_lag_in_records_and_seconds_and_what_is_parked(
    cli: Cli, embedded: Book, portal: BlockingPortal, topic: str
) -> None:
    portal.run(embedded.journal(topic).append("o-1", [Event(1)]))
    portal.run(write_garbage(embedded, topic))
    before = cli("pipeline", "status")
    assert sum(row.get("lag", 0) for row in before.rows) == 2
    assert sum(row.get("lag_s", 0) for row in before.rows) > 0
    assert cli("pipeline", "replicate", "--once").code == 0
    *partitions, job = cli("pipeline", "status").rows
    assert [row["lag"] for row in partitions] == [0] * 4
    assert job["parked"] == 1
    assert job["job"]["records"] >= 2


def test_a_topic_that_nobody_has_written_is_exit_code_4(cli: Cli) -> None:
    """Not 0: a misspelt name would look as if all were well."""
    assert cli("pipeline", "status", "--topic", "nobody").code == 4
    assert cli("pipeline", "verify", "nobody").code == 4


def test_a_stopped_partition_is_exit_code_5_with_the_remedy(
    cli: Cli, embedded: Book, portal: BlockingPortal, topic: str
) -> None:
    portal.run(embedded.journal(topic).append("o-1", [Event(1)]))
    portal.run(write_garbage(embedded, topic, value=newer_record()))
    done = cli("pipeline", "replicate", "--once")
    assert done.code == 5
    assert "is stopped" in done.err
    assert "upgrade" in done.err
    assert [row["stopped"] for row in cli("pipeline", "status").rows if row.get("stopped")]


def test_verify_tells_differences_as_rows_and_by_its_exit_code(
    cli: Cli, embedded: Book, portal: BlockingPortal, topic: str
) -> None:
    portal.run(write_history(embedded, topic, steps=40))
    portal.run(replicate_here(embedded, embedded.store, topic))
    assert cli("pipeline", "verify").code == 0
    damaged = portal.run(damage(embedded, topic))
    found = cli("pipeline", "verify")
    assert found.code == 1
    *differences, summary = found.rows
    assert damaged.items() <= {(row["id"], row["what"]) for row in differences}
    assert summary["left"] == len(differences)
    # As with `rebuild`, a topic may be named by its place; another one is not looked at.
    portal.run(embedded.journal("sound").append("o-1", [Event(1)]))
    portal.run(replicate_here(embedded, embedded.store, "sound"))
    assert cli("pipeline", "verify", topic).code == 1
    sound = cli("pipeline", "verify", "sound")
    assert (sound.code, sound.rows[-1]["journals"]) == (0, 1)
    assert cli("pipeline", "verify", "--repair").code == 0
    assert cli("pipeline", "verify").code == 0


def test_up_replicates_purges_what_has_expired_and_leaves_nothing_running(
    tmp_path: Path, embedded: Book, portal: BlockingPortal
) -> None:
    folder = embedded.settings.folder
    toml = tmp_path / "up.toml"
    toml.write_text(f'folder = "{folder}"\n[pipeline]\npurge_every_s = 0.5\nlook_every_s = 0.2\n')
    journal = embedded.journal("orders")
    portal.run(journal.append("stays", [Event(1)]))
    portal.run(journal.append("goes", [Event(1)], expire_after=timedelta(milliseconds=1)))
    with running("up", "--json", "--every-s", "0.2", "--book", str(toml)) as command:
        # Three records: two appends and the purge of one of them, for which it must have been replicated first.
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
        code, _ = command.end()
    assert code == 0
    assert not processes_with(f"--until-input-ends\0--json\0--book\0{toml}")


@pytest.mark.parametrize("missing", ["pyspark", "java"])
def test_up_without_spark_says_so_and_stays_open(tmp_path: Path, missing: str) -> None:
    code = WITHOUT_PYSPARK if missing == "pyspark" else "from tidebook.cli.app import main; main()"
    more = {} if missing == "pyspark" else {"JAVA_HOME": "", "PATH": str(tmp_path)}
    with running("up", "--json", "--book", str(tmp_path / "book"), code=code, **more) as command:
        row = command.until(lambda row: str(row.get("replication", "")).startswith("off"))
        assert {"pyspark": "pip install 'tidebook[spark]'", "java": "Java 17"}[missing] in row["replication"]
        assert command.end()[0] == 0


def test_replicate_waits_for_a_store_that_is_down_when_it_starts(tmp_path: Path) -> None:
    pytest.importorskip("acsylla")
    toml = tmp_path / "tidebook.toml"
    toml.write_text(f'folder = "{tmp_path / "book"}"\n[store]\nurl = "cassandra://127.0.0.1:{free_port()}/nobody"\n')
    with running("pipeline", "replicate", "--json", "--book", str(toml)) as command:
        first = command.until(lambda row: True)
        assert "Cassandra" in first["waiting"]
        assert command.process.poll() is None
        code, _ = command.end()
    assert code == 0
