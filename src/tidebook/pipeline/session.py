"""Spark sessions for the jobs: on this machine by default, or on the cluster that `spark-submit` was given."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from tidebook.pipeline.jars import kafka_source_jars
from tidebook.pipeline.records import SLICE_RECORDS_MAX, SLICE_VALUE_BYTES_MAX
from tidebook.pipeline.settings import PipelineSettings, pipeline_settings
from tidebook.wiring.settings import Settings

#: What every job wants, wherever it runs.
DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    # One Arrow batch is one slice of a partition: as many records as make the store's round trips cheap, and never
    # more bytes than a worker can hold.
    "spark.sql.execution.arrow.maxRecordsPerBatch": str(SLICE_RECORDS_MAX),
    "spark.sql.execution.arrow.maxBytesPerBatch": str(SLICE_VALUE_BYTES_MAX),
    # A second copy of a slow task would be a second replicator: harmless, and useless.
    "spark.speculation": "false",
    "spark.sql.streaming.stopTimeout": "60s",
    # Batches are never replayed from it: each run begins from the store's pointers.
    "spark.sql.streaming.minBatchesToRetain": "10",
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    # Nobody looks at Spark's own page: what it would show need not be brought up to date ten times a second.
    "spark.ui.liveUpdate.period": "60s",
}
LOCAL = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "4",
    # The other kind asks `readlink` of the shell for every file it renames.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}


#: Secrets that may come from the environment: the executors need them as well. Spark redacts such names.
PASSWORDS = ("TIDEBOOK_LOG_PASSWORD", "TIDEBOOK_STORE_PASSWORD")


def submitted() -> bool:
    """Whether `spark-submit` has set Spark up already."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def job_session(name: str, settings: Settings, more: Mapping[str, str] | None = None) -> SparkSession:
    """A session that can read the log of these settings."""
    own = pipeline_settings(settings)
    wanted = {f"spark.executorEnv.{each}": os.environ[each] for each in PASSWORDS if each in os.environ}
    wanted |= more or {}
    if settings.section("log").url is not None and not submitted() and "spark.jars" not in own.spark:
        jars = own.jars if own.jars is not None else [str(each) for each in kafka_source_jars()]
        wanted["spark.jars"] = ",".join([*jars, *filter(None, [wanted.get("spark.jars")])])
    return spark_session(name, own, wanted)


def spark_session(name: str, settings: PipelineSettings, more: Mapping[str, str] | None = None) -> SparkSession:
    """The running session, or a new one: on the cluster that was submitted to, else on the master of the settings."""
    wanted = dict(DEFAULTS)
    if not submitted():
        wanted["spark.master"] = settings.master
        if settings.master.startswith("local"):
            wanted |= LOCAL
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
            os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    wanted |= settings.spark
    wanted |= more or {}
    builder = SparkSession.builder.appName(name)
    for key, value in wanted.items():
        builder = builder.config(key, value)
    # What it logs it raises as well; and a JVM that was ended together with us is not worth a page of traces.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def local_uri(path: Path) -> str:
    """A folder of this machine for Spark, whatever its default file system is. Not `as_uri`: Hadoop decodes no %20."""
    return f"file://{path.absolute()}"


@contextmanager
def unless_spark_is_gone() -> Iterator[None]:
    """For what tidies up in Spark: service managers end a whole group of processes, and the JVM may be the first."""
    try:
        yield
    except (Py4JError, ConnectionError, EOFError):
        return
