"""The jars that PySpark does not ship: Spark's Kafka source, and Delta Lake."""

from __future__ import annotations

from pathlib import Path

from tidebook.pipeline.ivy import Artifact, resolve

SPARK = "4.2.0"
DELTA = "4.4.0"


def kafka_source_jars() -> list[Path]:
    """Return the jars of Spark's Kafka source and sink, for the setting spark.jars.

    The newest published token provider is 4.0.0, and it works with this Spark. The Kafka client must stay at the
    version that the source was built for, hence no transitive dependencies.
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
    """Return the jars of Delta Lake, for the setting spark.jars; Spark ships its other dependencies."""
    modules = ("delta-spark_4.2_2.13", "delta-storage", "delta-kernel-api", "delta-kernel-defaults")
    return resolve(f"delta-{DELTA}", [Artifact("io.delta", module, DELTA, transitive=False) for module in modules])
