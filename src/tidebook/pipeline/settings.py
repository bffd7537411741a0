"""What a user may set of the pipeline: `[pipeline]` in tidebook.toml."""

from __future__ import annotations

import msgspec

from tidebook.core.errors import InvalidInput
from tidebook.wiring.settings import Settings, options_as


class PipelineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the jobs run, and their bounds."""

    #: Spark's master, where `spark-submit` has not said it.
    master: str = "local[*]"
    #: More of Spark's own settings, by their full names.
    spark: dict[str, str] = {}
    #: The jars of Spark's Kafka source; without them they are resolved, and kept in the user's cache folder.
    jars: tuple[str, ...] | None = None
    #: How often a running replication looks for new records.
    trigger_s: float = 0.2
    #: How many records one micro-batch takes from the log, over all partitions: a full slice of each of eight.
    records_max: int = 800_000
    #: How often a running replication looks for new topics, and tells how far it is.
    look_every_s: float = 2.0
    #: How long one task waits for a store or log that does not answer before its query starts anew.
    wait_s: float = 30.0
    #: How often `tidebook up` purges what has expired.
    purge_every_s: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("trigger_s", "look_every_s", "wait_s", "purge_every_s"):
            if getattr(self, name) < 0:
                raise InvalidInput(f"[pipeline] {name} is a time in seconds, not {getattr(self, name)}")
        if self.records_max < 1:
            raise InvalidInput(f"[pipeline] records_max is at least 1, not {self.records_max}")


def pipeline_settings(settings: Settings) -> PipelineSettings:
    """The `[pipeline]` section of a book's settings."""
    found: PipelineSettings = options_as(settings.section("pipeline"), "pipeline", PipelineSettings)
    return found
