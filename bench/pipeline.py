"""The pipeline on local Spark: replication and a bare job, latency at a steady rate, the data source and Kafka's.

`./dev bench` starts Kafka and Cassandra unless they are running.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tidebook
from bench.pipeline_parts.bare import await_compactions, bare_task, drop
from bench.pipeline_parts.bare_journals import bare_journals_task
from bench.servers import running
from bench.timing import Rounds, percentile, report, timed
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.wiring.book import Book

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tidebook.pipeline.jobs.replicate import Replication

PARTITIONS = 8
#: The events that each job replicates as a warm-up, first in appends of one event, then of ten: writing a row costs a
#: Cassandra node that has just started up to four times as much, until its code is compiled.
WARM_UP = 50_000
WARM_UP_TENS = 100_000
#: How many times both sides of a ratio are measured, alternately; the medians are reported.
ROUNDS = 3
#: A further round is skipped if it would end after this time.
ROUNDS_S_MAX = 300.0
#: The time that the JVMs need to compile the code of leases and slices.
STEADY_WARM_UP_S = 60
STEADY = ("steady_p50_s", "steady_p99_s", "steady_follower_p50_s", "steady_stop_s")
GAP = tuple(f"lease_gap{load}_{which}_s" for load in ("", "_loaded") for which in ("p50", "p99", "max"))
IDLE = ("idle_cores", "idle_mb", "up_first_event_s", "up_first_start_event_s", "up_stop_s")
TARGETS = {
    "cassandra_vs_bare": 0.8,
    "journals_vs_bare": 0.6,
    "embedded_vs_bare": 1.0,
    "ten_events_vs_single": 2.0,
    "steady_p50_s": 0.1,
    "steady_p99_s": 0.4,
    "steady_follower_p50_s": 0.2,
    "steady_stop_s": 2.0,
    **dict.fromkeys(GAP, 0.05),
    "source_embedded_vs_kafka": 0.5,
    "source_cassandra_vs_kafka": 0.5,
    "start_beyond_spark_s": 3.0,
    "start_beyond_session_s": 4.0,
    "idle_cores": 0.05,
    "idle_mb": 900.0,
    "up_first_event_s": 8.0,
    "up_first_start_event_s": 8.0,
    "up_stop_s": 2.0,
}


def main(argv: list[str]) -> None:
    """Run all parts and print the ratios."""
    parser = argparse.ArgumentParser(prog="bench pipeline", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    parser.add_argument("--appends", type=int, help="the number of appends in each part (default: 500,000)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of replicate, ten, journals and embedded")
    parser.add_argument(
        "--only",
        help="parts, separated by commas: replicate, ten, journals, embedded, steady, gap, source, start, idle",
    )
    options = parser.parse_args(argv)
    servers = running()
    with tempfile.TemporaryDirectory(prefix="tidebook-bench-") as folder:
        bench = Bench(Path(folder), servers["kafka"]["address"], servers["cassandra"]["address"], quick=options.quick)
        bench.count = options.appends or bench.count
        try:
            bench.run(set(options.only.split(",")) if options.only else None, rounds=options.rounds)
        finally:
            bench.close()
    figures = {name: round(value, 3) for name, value in bench.figures.items()}
    ratios = bench.ratios()
    report("pipeline", ratios, figures, {name: target for name, target in TARGETS.items() if name in ratios})


class Bench:
    """One run with its own topics."""

    def __init__(self, folder: Path, kafka: str, cassandra: str, *, quick: bool) -> None:
        from tidebook.pipeline.session import job_session

        self.count = 50_000 if quick else 500_000
        self.warm_up_s = 20 if quick else STEADY_WARM_UP_S
        self.folder = folder
        self.books: list[Book] = []
        self.filled: set[tuple[Book, str]] = set()
        self.cassandra = cassandra
        self.name = uuid.uuid4().hex[:8]
        self.keyspace = f"tidebook_bench_{self.name}"
        self.toml = folder / "tidebook.toml"
        common = f"[journal]\npartitions = {PARTITIONS}\n"
        servers = f'[log]\nurl = "kafka://{kafka}"\n[store]\nurl = "cassandra://{cassandra}/'
        self.toml.write_text(f'{servers}{self.keyspace}"\n{common}')
        # The keyspace is new, because a scan of token ranges reads the rows of all topics.
        (folder / "source.toml").write_text(f'{servers}{self.keyspace}_source"\n{common}')
        (folder / "embedded.toml").write_text(f'folder = "book"\n{common}')
        self.portal = BlockingPortal()
        self.book = self._open(self.toml)
        self.embedded = self._open(folder / "embedded.toml")
        self.spark: SparkSession = job_session("tidebook bench", self.book.settings)
        self.rounds = Rounds()
        self.figures: dict[str, float] = {}

    def _open(self, where: Path) -> Book:
        book = tidebook.open(where)
        self.portal.run(book.__aenter__())
        self.books.append(book)
        return book

    def close(self) -> None:
        self.spark.stop()
        for book in self.books:
            self.portal.run(book.__aexit__(None, None, None))
        for keyspace in (self.keyspace, f"{self.keyspace}_source"):
            self.portal.run(drop(self.cassandra, keyspace))
        self.portal.close()

    def run(self, only: set[str] | None, *, rounds: int) -> None:
        parts = {"steady": self.steady, "gap": self.gap, "source": self.source, "start": self.start, "idle": self.idle}
        in_turn = {
            "journals": (self.bare_journals, self.journals),
            "replicate": (self.bare, self.into_cassandra),
            "ten": (self.ten,),
            "embedded": (self.into_embedded,),
        }
        began = time.monotonic()
        chosen = in_turn.keys() | parts.keys() if only is None else only
        sides = [side for name, some in in_turn.items() if name in chosen for side in some]
        if sides:
            self._warm_up(self.book)
        if self.into_embedded in sides:
            self._warm_up(self.embedded)
        self._in_turn(sides, rounds)
        for name, part in parts.items():
            if name in chosen:
                part()
        self.figures["bench_s"] = time.monotonic() - began

    def _in_turn(self, sides: Sequence[Callable[[int], None]], rounds: int) -> None:
        """Run the sides alternately, in reverse order every other round, because one may still slow down the next."""
        began = time.monotonic()
        for number in range(rounds):
            if number and (time.monotonic() - began) * (number + 1) / number > ROUNDS_S_MAX:
                break
            for side in sides[::-1] if number % 2 else sides:
                with timed("waiting until the node has compacted"):
                    self.portal.run(await_compactions(self.cassandra))
                side(number)
        self.figures |= self.rounds.medians()

    def ratios(self) -> dict[str, float]:
        """Return the ratios of the parts that were run."""
        f = self.figures
        found: dict[str, float] = {}
        for name, above, below in (
            ("journals_vs_bare", "journals_per_s", "bare_journals_per_s"),
            ("cassandra_vs_bare", "cassandra_events_per_s", "bare_rows_per_s"),
            ("embedded_vs_bare", "embedded_events_per_s", "bare_rows_per_s"),
            ("ten_events_vs_single", "ten_events_per_s", "cassandra_events_per_s"),
            ("source_embedded_vs_kafka", "source_embedded_events_per_s", "kafka_records_per_s"),
            ("source_cassandra_vs_kafka", "source_cassandra_events_per_s", "kafka_records_per_s"),
        ):
            if above in f and below in f:
                found[name] = f[above] / f[below]
        found |= {name: f[name] for name in (*STEADY, *GAP, *IDLE) if name in f}
        if "first_batch_s" in f:
            # The additional time compared with a streaming job that only counts, and with the session alone.
            found["start_beyond_spark_s"] = f["first_batch_s"] - f["spark_start_s"]
            found["start_beyond_session_s"] = f["start_query_s"]
        return found

    def _fill(self, book: Book, what: str, *, appends: int, journals: int, events: int = 1) -> str:
        from bench.pipeline_parts.workload import fill

        topic = f"{what}-{self.name}"
        if (book, topic) in self.filled:
            return topic
        self.filled.add((book, topic))
        with timed(f"filling {topic} with {appends:,} appends of {journals:,} journals"):
            self.portal.run(fill(book, topic, appends=appends, journals=journals, events=events))
        return topic

    def _job(self, book: Book, topic: str) -> Replication:
        from tidebook.pipeline.jobs.replicate import Replication

        return Replication(self.spark, book, self.portal, topics=[topic])

    def _warm_up(self, book: Book) -> None:
        """Load classes, start Python workers and open connections before anything is measured."""
        topics = [self._fill(book, "warm", appends=WARM_UP, journals=10_000)]
        if book is self.book:
            topics.append(self._fill(book, "warm-tens", appends=WARM_UP_TENS, journals=10_000, events=10))
        with timed("warming up"):
            for topic in topics:
                self._job(book, topic).run(once=True)
                if book is self.book:
                    self._bare(topic)

    def _bare(self, topic: str, new_task: Callable[[str, str, str], Any] = bare_task) -> int:
        from tidebook.pipeline.source.records import read_records

        config = self.portal.run(self.book.journal(topic).create())
        stops = {str(n): self.portal.run(self.book.log.end(topic, n)) for n in range(config.partitions)}
        records = read_records(self.spark, self.book.settings, {topic: dict.fromkeys(stops, 0)}, {topic: stops})
        task = new_task(self.cassandra, self.keyspace, f"bare-{topic}")
        return sum(int(row["rows"]) for row in records.mapInArrow(task, "rows long").collect())

    def _single(self, book: Book, number: int) -> str:
        """Return a topic with single-event appends to 10,000 journals."""
        return self._fill(book, f"single-{number}", appends=self.count, journals=10_000)

    def bare(self, number: int) -> None:
        """Measure the bare job, which writes the rows of these appends."""
        topic = self._single(self.book, number)
        with timed("the bare job") as watch:
            rows = self._bare(topic)
        self.rounds.add("bare_rows_per_s", watch.rate(rows))

    def into_cassandra(self, number: int) -> None:
        """Measure the replication of the same appends to Cassandra."""
        topic = self._single(self.book, number)
        with timed("replicating to Cassandra") as watch:
            self._job(self.book, topic).run(once=True)
        self.rounds.add("cassandra_events_per_s", watch.rate(self.count))

    def ten(self, number: int) -> None:
        """Measure the replication of appends of ten events each."""
        topic = self._fill(self.book, f"ten-{number}", appends=self.count // 5, journals=10_000, events=10)
        with timed("replicating appends of ten events") as watch:
            self._job(self.book, topic).run(once=True)
        self.rounds.add("ten_events_per_s", watch.rate(self.count * 2))

    def into_embedded(self, number: int) -> None:
        """Measure the replication of the same appends from the embedded log to the embedded store."""
        topic = self._single(self.embedded, number)
        with timed("replicating to the embedded store") as watch:
            self._job(self.embedded, topic).run(once=True)
        self.rounds.add("embedded_events_per_s", watch.rate(self.count))

    def bare_journals(self, number: int) -> None:
        """Measure a job that only reads and writes the same heads and rows, with as many journals as appends."""
        topic = self._many(number)
        with timed("the bare job, with heads") as watch:
            rows = self._bare(topic, bare_journals_task)
        self.rounds.add("bare_journals_per_s", watch.rate(rows))

    def journals(self, number: int) -> None:
        """Measure the replication of as many journals as appends."""
        topic = self._many(number)
        with timed("replicating as many journals as appends") as watch:
            self._job(self.book, topic).run(once=True)
        self.rounds.add("journals_per_s", watch.rate(self.count))

    def _many(self, number: int) -> str:
        return self._fill(self.book, f"many-{number}", appends=self.count, journals=self.count)

    def idle(self) -> None:
        """Measure processor time and memory of an idle `tidebook up` with Spark over an embedded book."""
        from bench.pipeline_parts.idle import idle

        with timed("tidebook up, from its start to the first replicated event, and idle"):
            self.figures |= idle(self.folder / "idle")

    def steady(self) -> None:
        """Measure 1,000 appends per second while the job runs, and after the warm-up also the processor time."""
        from bench.pipeline_parts.steady import steady

        topic = self._fill(self.book, "steady", appends=PARTITIONS * 10, journals=1000)
        job = self._job(self.book, topic)
        thread = threading.Thread(target=job.run)
        thread.start()
        try:
            with timed("until the first records are replicated"):
                while not self.portal.run(self.book.store.pointers(topic)):
                    time.sleep(0.1)
            with timed("1,000 appends per second"):
                work = steady(self.book, topic, per_s=1000, seconds=30, warm_up_s=self.warm_up_s)
                measuring = self.portal.submit(work)
                time.sleep(self.warm_up_s)
                before_s, began_s = self._processor_s(), time.monotonic()
                time.sleep(25)
                for name, seconds in self._processor_s().items():
                    used = (seconds - before_s[name]) / (time.monotonic() - began_s)
                    self.figures[f"steady_cores_{name}"] = used
                self.figures |= measuring.result()
        finally:
            with timed("until it has stopped") as watch:
                job.stop()
                thread.join()
            self.figures["steady_stop_s"] = watch.seconds

    def gap(self) -> None:
        """Measure how long no lease serves a partition at a hand-over, while all slots of Spark are in use."""
        from bench.pipeline_parts.lease_gap import busy_cores, tail_gaps

        for name, load in (("lease_gap", nullcontext()), ("lease_gap_loaded", busy_cores())):
            topic = f"{name.replace('_', '-')}-{self.name}"
            with timed(f"hand-overs of leases: {name}"), load:
                gaps = tail_gaps(self.spark.sparkContext, self.book, self.portal, topic)
            for quantile, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
                self.figures[f"{name}_{quantile}_s"] = percentile(gaps, share)

    def _processor_s(self) -> dict[str, float]:
        """Return the processor time so far of Spark with its workers, of this process, and of the servers."""
        from bench.pipeline_parts.processor_time import descendants, processor_s

        servers = {name: processor_s([each["pid"]]) for name, each in running().items() if "pid" in each}
        spark = processor_s(descendants(os.getpid()))
        return {"spark": spark, "driver_and_appender": processor_s([os.getpid()]), **servers}

    def source(self) -> None:
        """Measure the data source and Kafka's connector, with its defaults and tuned, on the same events.

        The last two measurements add a tenth of the events after the replication, which is then read from the log.
        """
        from bench.pipeline_parts.workload import fill
        from bench.replication import replicate
        from tidebook.pipeline.source.format import register
        from tidebook.pipeline.source.records import read_records

        count, journals = self.count * 2, 10_000
        book = self._open(self.folder / "source.toml")
        topic = self._fill(book, "source", appends=count, journals=journals)
        self._fill(self.embedded, "source", appends=count, journals=journals)
        with timed("replicating both"):
            self._job(book, topic).run(once=True)
            self.portal.run(replicate(self.embedded, topic))
        register(self.spark)
        stops = {str(n): self.portal.run(book.log.end(topic, n)) for n in range(PARTITIONS)}
        starts = dict.fromkeys(stops, 0)
        readings = {
            "kafka_records_per_s": self._kafka(topic),
            "kafka_tuned_records_per_s": read_records(self.spark, book.settings, {topic: starts}, {topic: stops}),
            "source_embedded_events_per_s": self._events(self.embedded, topic),
            "source_cassandra_events_per_s": self._events(book, topic),
        }
        for _ in range(2):  # the first round warms up
            for name, frame in readings.items():
                with timed(name.removesuffix("_per_s")) as watch:
                    frame.write.format("noop").mode("overwrite").save()
                self.figures[name] = watch.rate(count)
        for at in (self.embedded, book):
            _check_rows(self._events(at, topic), journals=journals, events=count // journals)
        with timed("appending a tenth more"):
            for at in (self.embedded, book):
                self.portal.run(fill(at, topic, appends=count // 10, journals=journals))
        for name, at in {"embedded": self.embedded, "cassandra": book}.items():
            frame = self._events(at, topic)
            with timed(f"source {name} with a tenth in the log") as watch:
                frame.write.format("noop").mode("overwrite").save()
            self.figures[f"source_{name}_tail_events_per_s"] = watch.rate(count + count // 10)
            _check_rows(frame, journals=journals, events=(count + count // 10) // journals)

    def _kafka(self, topic: str) -> DataFrame:
        servers = self.book.settings.section("log").url
        assert servers is not None
        reader = self.spark.read.format("kafka").option("kafka.bootstrap.servers", servers.removeprefix("kafka://"))
        return reader.option("subscribe", topic).load()

    def _events(self, book: Book, topic: str) -> DataFrame:
        from tidebook.wiring.settings import settings_to_json

        reader = self.spark.read.format("tidebook").option("settings", settings_to_json(book.settings))
        return reader.option("topic", topic).load()

    def start(self) -> None:
        """Measure a new process up to its first batch, and one whose streaming job only counts the same records."""
        names = {"bare": ("spark", "spark_start_s"), "replicate": ("start", "first_batch_s")}
        rounds = Rounds()
        for number, kinds in enumerate((("bare", "replicate"), ("replicate", "bare"))):
            topic = self._fill(self.book, f"start-{number}", appends=1000, journals=100)
            for kind in kinds:
                with timed(f"a fresh process: {kind}"):
                    command = [sys.executable, "-m", "bench.pipeline_parts.start", kind, str(self.toml), topic]
                    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
                found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
                of_part, whole = names[kind]
                rounds.add(whole, found.pop("first_batch_s"))
                for part, seconds in found.items():
                    rounds.add(f"{of_part}_{part}", seconds)
        self.figures |= rounds.medians()


def _check_rows(frame: DataFrame, *, journals: int, events: int) -> None:
    """Raise an error unless this query returns events 1 to `events` of each journal, each once.

    The speed of a wrong read would be meaningless.
    """
    from pyspark.sql.functions import col, count, count_distinct, count_if, max

    of_journal = frame.groupBy("id").agg(
        count("*").alias("rows"), count_distinct("seq_nr").alias("numbers"), max("seq_nr").alias("last")
    )
    right = (col("rows") == events) & (col("numbers") == events) & (col("last") == events)
    found = of_journal.agg(count("*").alias("all"), count_if(right).alias("right")).collect()[0]
    if tuple(found) != (journals, journals):
        raise AssertionError(f"{found['all']} journals, of which {found['right']} are right: {journals} were written")
    # The filters of two queries over one frame must not affect each other.
    both = frame.where("id = 'j-1'").union(frame.where("id = 'j-2'")).groupBy("id").count().collect()
    if {row["id"]: row["count"] for row in both} != {"j-1": events, "j-2": events}:
        raise AssertionError(f"a union of two filters returned {both}")
