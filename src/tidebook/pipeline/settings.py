"""The settings of the pipeline: `[pipeline]` in tidebook.toml."""

from __future__ import annotations

import msgspec

from tidebook.core.errors import InvalidInput
from tidebook.wiring.settings import Settings, options_as


class PipelineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the jobs run, and their intervals and limits."""

    #: Spark's master, unless the job was started by `spark-submit`.
    master: str = "local[*]"
    #: Additional Spark settings, by their full names.
    spark: dict[str, str] = {}
    #: The jars of Spark's Kafka source; by default they are downloaded to the user's cache folder.
    jars: tuple[str, ...] | None = None
    #: How often a running replication starts a micro-batch.
    trigger_s: float = 0.2
    #: The most records of one micro-batch over all partitions; the default is a full slice for each of eight.
    records_max: int = 800_000
    #: How often a running replication checks for new topics and reports its progress.
    look_every_s: float = 2.0
    #: How long a task retries while the store or log is unavailable before its query restarts.
    wait_s: float = 30.0
    #: How often `tidebook up` purges expired journals.
    purge_every_s: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("trigger_s", "look_every_s", "wait_s", "purge_every_s"):
            if getattr(self, name) < 0:
                raise InvalidInput(f"[pipeline] {name} is a time in seconds, not {getattr(self, name)}")
        if self.records_max < 1:
            raise InvalidInput(f"[pipeline] records_max is at least 1, not {self.records_max}")


def pipeline_settings(settings: Settings) -> PipelineSettings:
    """Return the `[pipeline]` section of a book's settings."""
    found: PipelineSettings = options_as(settings.section("pipeline"), "pipeline", PipelineSettings)
    return found
