"""The Java parts that Spark does not bring itself: its Kafka source, and Delta Lake."""

from __future__ import annotations

from pathlib import Path

from tidebook.pipeline.ivy import Artifact, resolve

SPARK = "4.2.0"
DELTA = "4.4.0"


def kafka_source_jars() -> list[Path]:
    """What Spark's Kafka source and sink need, for the setting spark.jars.

    The token provider is published up to 4.0.0 only, and serves. The broker's newer client must not come along.
    """
    return resolve(
        f"spark-kafka-{SPARK}",
        [
            Artifact("org.apache.spark", "spark-sql-kafka-0-10_2.13", SPARK, transitive=False),
            Artifact("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.0.0", transitive=False),
            Artifact("org.apache.kafka", "kafka-clients", "3.9.2", transitive=False),
            Artifact("org.apache.commons", "commons-pool2", "2.13.1", transitive=False),
            Artifact("org.scala-lang.modules", "scala-parallel-collections_2.13", "1.2.0", transitive=False),
        ],
    )


def delta_jars() -> list[Path]:
    """Delta Lake for the same Spark, for the setting spark.jars; the rest of what it needs, Spark brings."""
    modules = ("delta-spark_4.2_2.13", "delta-storage", "delta-kernel-api", "delta-kernel-defaults")
    return resolve(f"delta-{DELTA}", [Artifact("io.delta", module, DELTA, transitive=False) for module in modules])
