"""Spark sessions for the jobs: local by default, or whatever `spark-submit` has set up."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from pyspark.sql import SparkSession

#: What every job wants, whoever starts it.
DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.session.timeZone": "UTC",
    # A second copy of a slow task would be a second replicator: harmless, and useless.
    "spark.speculation": "false",
    "spark.sql.streaming.stopTimeout": "60s",
    "spark.sql.streaming.metricsEnabled": "false",
}
LOCAL = {
    "spark.master": "local[*]",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
}


def spark_session(name: str, options: Mapping[str, str] | None = None) -> SparkSession:
    """The running session, or a new one: on the cluster that was submitted to, else on this machine."""
    builder = SparkSession.builder.appName(name)
    submitted = "SPARK_ENV_LOADED" in os.environ or "PYSPARK_GATEWAY_PORT" in os.environ
    wanted = DEFAULTS | ({} if submitted else LOCAL) | dict(options or {})
    if wanted.get("spark.master", "").startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    for key, value in wanted.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session
