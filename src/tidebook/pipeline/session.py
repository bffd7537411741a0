"""The settings of the pipeline, and Spark sessions for its jobs: local, or on the cluster of `spark-submit`."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tidebook.core.errors import InvalidInput
from tidebook.pipeline.class_archive import CLASS_PATH, JAVA_OPTIONS, LOCAL_JAVA_OPTIONS, read_options, write_later
from tidebook.pipeline.jars import kafka_source_jars
from tidebook.replication.slice import SLICE_RECORDS_MAX, SLICE_VALUE_BYTES_MAX
from tidebook.replication.status import Engine
from tidebook.wiring.adapters import extra
from tidebook.wiring.book import Book
from tidebook.wiring.replication import is_embedded, require_embedded
from tidebook.wiring.settings import DEFAULT_BOOK, Settings, options_as, read_settings
from tidebook.wiring.spark import require_book
from tidebook.wiring.sync import SyncBook

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession


#: Settings of every job, local or on a cluster.
DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    # One Arrow batch is one slice: large enough for few store round trips, small enough for a worker.
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(SLICE_RECORDS_MAX),
    "spark.sql.execution.arrow.maxBytesPerBatch": str(SLICE_VALUE_BYTES_MAX),
    # A speculative copy of a task would be a second replicator: harmless, but useless.
    "spark.speculation": "false",
    "spark.sql.streaming.stopTimeout": "60s",
    # The checkpoint is never read: each run starts from the store's pointers.
    "spark.sql.streaming.minBatchesToRetain": "10",
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    # The Spark UI is off, so its data need not be up to date; the default interval is 100 ms.
    "spark.ui.liveUpdate.period": "60s",
}
LOCAL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    JAVA_OPTIONS: LOCAL_JAVA_OPTIONS,
    "spark.sql.shuffle.partitions": "4",
    # The default manager forks a shell (`readlink`) for every rename.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}
#: A machine that fails does not close its connections. Its executor counts as lost after half a minute without a
#: heartbeat, instead of two to three minutes: its slots must not count much longer than the leases on it last.
CLUSTER = {
    "spark.executor.heartbeatInterval": "5s",
    "spark.storage.blockManagerHeartbeatTimeoutMs": "30s",
    "spark.network.timeoutInterval": "5s",
}
#: A shorter lease would overlap with its successor for more than half of its duration.
LEASE_S_MIN = 2.0
#: Secrets from the environment that the executors need too. Spark redacts settings with such names.
PASSWORDS = ("TIDEBOOK_LOG_PASSWORD", "TIDEBOOK_STORE_PASSWORD")


class PipelineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the jobs run, and their intervals and limits."""

    #: The engine of `tidebook up` and `tidebook pipeline replicate`; by default `inline` if log and store are embedded,
    #: else `spark`.
    engine: Engine | None = None
    #: Spark's master, unless the job was started by `spark-submit`.
    master: str = "local[*]"
    #: Additional Spark settings, by their full names.
    spark: dict[str, str] = {}
    #: The jars of Spark's Kafka source; by default they are downloaded to the user's cache folder.
    jars: tuple[str, ...] | None = None
    #: How long a task tails its log partitions before the next task takes over; with 0, replication runs in
    #: micro-batches only.
    lease_s: float = 20.0
    #: If more records than this are not replicated, micro-batches catch up before partitions are leased.
    catch_up_records: int = 100_000
    #: How often a running replication without leases starts a micro-batch.
    trigger_s: float = 0.2
    #: The maximum number of records in one micro-batch, over all partitions; the default is eight full slices.
    records_max: int = 800_000
    #: How often a running replication checks for new topics and reports its progress.
    look_every_s: float = 2.0
    #: How long a task retries while the store or log is unavailable before its query restarts; a lease retries for five
    #: seconds at most.
    wait_s: float = 30.0
    #: How often `tidebook up` purges expired journals.
    purge_every_s: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("lease_s", "trigger_s", "look_every_s", "wait_s", "purge_every_s"):
            if getattr(self, name) < 0:
                raise InvalidInput(f"[pipeline] {name} must be at least 0 seconds, not {getattr(self, name)}")
        if 0 < self.lease_s < LEASE_S_MIN:
            raise InvalidInput(f"[pipeline] lease_s must be 0 or at least {LEASE_S_MIN}, not {self.lease_s}")
        if self.catch_up_records < 0:
            raise InvalidInput(f"[pipeline] catch_up_records must be at least 0, not {self.catch_up_records}")
        if self.records_max < 1:
            raise InvalidInput(f"[pipeline] records_max must be at least 1, not {self.records_max}")


def pipeline_settings(settings: Settings) -> PipelineSettings:
    """Return the `[pipeline]` section of a book's settings."""
    found: PipelineSettings = options_as(settings.section("pipeline"), "pipeline", PipelineSettings)
    return found


def choose_engine(settings: Settings) -> Engine:
    """Return the engine that replicates a book; raise `InvalidInput` if `inline` is set for a book on servers."""
    engine = pipeline_settings(settings).engine
    if engine == "inline":
        require_embedded(settings, '[pipeline] engine = "inline"')
    return engine or ("inline" if is_embedded(settings) else "spark")


def submitted() -> bool:
    """Return whether this process was started by `spark-submit`."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def spark(book: str | Path | Book | SyncBook = DEFAULT_BOOK) -> SparkSession:
    """Return a Spark session in which `format("tidebook")` reads this book; `book` is as for `tidebook.open`.

    The session is local, or as configured in `[pipeline]` of `tidebook.toml`; a running session, or one of Spark
    Connect, is reused. Raise `NotFound` if there is no such book, and `InvalidInput` if PySpark is not installed or
    `book` is open through a server.

        spark = tidebook.spark("./tidebook-data")
        spark.read.format("tidebook").option("topic", "orders").load().show()
    """
    if isinstance(book, str | Path):
        settings = read_settings(book)
    elif isinstance(book, Book | SyncBook):
        settings = book.settings
    else:
        raise InvalidInput(f"a book is a folder, a tidebook.toml or an open book, not {type(book).__name__}")
    if settings.server is not None:
        raise InvalidInput(f"Spark cannot read a book through {settings.server}: use its folder or tidebook.toml")
    # A book of write-ahead logs alone has no store.
    require_book(settings, parts=("log" if settings.section("log").embedded else "store",))
    source = extra("tidebook.pipeline.source.format", "spark")
    session = _connect_session() or spark_session("tidebook", pipeline_settings(settings), _passwords())
    source.register(session, settings)
    return session


def _connect_session() -> SparkSession | None:
    """Return the session of Spark Connect if this process is its client, with the settings of its server; else None."""
    from pyspark.sql import SparkSession
    from pyspark.sql.utils import is_remote

    wanted = "SPARK_REMOTE" in os.environ or os.environ.get("SPARK_API_MODE", "").lower() == "connect"
    if not wanted and not is_remote():
        return None
    return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()


def job_session(name: str, settings: Settings, more: Mapping[str, str] | None = None) -> SparkSession:
    """Return a session that can read the book's log."""
    return spark_session(name, pipeline_settings(settings), _job_settings(settings, more))


def job_context(name: str, settings: Settings) -> SparkContext:
    """Return a context for leases; it starts faster than a session, which can be started in it later."""
    wanted = _spark_settings(pipeline_settings(settings), _job_settings(settings))
    from pyspark import SparkConf, SparkContext

    context = SparkContext.getOrCreate(SparkConf().setAppName(name).setAll(list(wanted.items())))
    context.setLogLevel("ERROR")
    if _reads_archive(wanted):  # no context is running yet
        write_later(wanted.get(CLASS_PATH, ""))
    return context


def _job_settings(settings: Settings, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the Spark settings of a job that reads the book's log."""
    own = pipeline_settings(settings)
    wanted = _passwords() | dict(more or {})
    if settings.section("log").url is not None and not submitted() and "spark.jars" not in own.spark:
        jars = own.jars if own.jars is not None else [str(each) for each in kafka_source_jars()]
        if own.master.startswith("local") and "spark.jars" not in wanted:
            # Local mode has one JVM, so the class path suffices: with spark.jars, its executor would copy and load the
            # jars before the first task.
            wanted[CLASS_PATH] = os.pathsep.join(jars)
        else:
            wanted["spark.jars"] = ",".join([*jars, *filter(None, [wanted.get("spark.jars")])])
    return wanted


def _passwords() -> dict[str, str]:
    return {f"spark.executorEnv.{each}": os.environ[each] for each in PASSWORDS if each in os.environ}


def spark_session(name: str, settings: PipelineSettings, more: Mapping[str, str] | None = None) -> SparkSession:
    """Return the running session or create one, on the submitted cluster, else on the master of the settings."""
    wanted = _spark_settings(settings, more)
    from pyspark.sql import SparkSession  # not at the top: the settings are read where Spark is not installed

    builder = SparkSession.builder.appName(name)
    for key, value in wanted.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def _spark_settings(settings: PipelineSettings, more: Mapping[str, str] | None) -> dict[str, str]:
    """Return all settings of a context, and prepare this process for it."""
    wanted = dict(DEFAULTS)
    if not submitted():
        wanted["spark.master"] = settings.master
    if not submitted() and settings.master.startswith("local"):
        wanted |= LOCAL
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        # Spark's start script first runs a short Java process that only prints the command to run.
        os.environ.setdefault("SPARK_LAUNCHER_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    else:
        wanted |= CLUSTER
    wanted |= settings.spark
    wanted |= more or {}
    if _reads_archive(wanted) and (options := read_options(wanted.get(CLASS_PATH, ""))):
        wanted[JAVA_OPTIONS] += f" {options}"
    # py4j also raises the errors that it logs, and a JVM that is terminated with this process is not an error. Some of
    # them, such as Ctrl-C, it logs to the root logger.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(is_not_of_py4j)
    return wanted


def is_not_of_py4j(record: logging.LogRecord) -> bool:
    """Return False for a log record of py4j."""
    return Path(record.pathname).parent.name != "py4j"


def _reads_archive(wanted: Mapping[str, str]) -> bool:
    """Return whether this process starts the JVM itself, with options that allow a class archive."""
    return not submitted() and wanted.get(JAVA_OPTIONS) == LOCAL_JAVA_OPTIONS


def local_uri(path: Path) -> str:
    """Return a local folder as a URI for Spark. `Path.as_uri` does not work: Hadoop does not decode %20."""
    return f"file://{path.absolute()}"


@contextmanager
def ignore_spark_exit() -> Iterator[None]:
    """Ignore connection errors of clean-up calls: a service manager may have terminated the JVM before this process."""
    from py4j.protocol import Py4JError

    try:
        yield
    except (Py4JError, ConnectionError, EOFError):
        return
