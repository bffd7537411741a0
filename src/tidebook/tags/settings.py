"""The settings of streams by tag: `[tags]` in tidebook.toml."""

from __future__ import annotations

from typing import Literal

import msgspec

from tidebook.core.errors import InvalidInput

Consistency = Literal["horizon", "delay"]


class TagSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How streams by tag are read."""

    #: What a stream waits for: until nothing can arrive late (horizon), or a fixed time (delay).
    consistency: Consistency = "horizon"
    #: Events per page of a stream.
    page_events: int = 1000
    #: Where a stream without an offset starts: an ISO date, such as the day of the first deployment.
    first_time_bucket: str = "2020-01-01"
    #: The longest time that a live stream waits for a wake-up before it reads again.
    poll_s: float = 1.0
    #: Whether deleted and purged events are removed from their streams (`follow`) or kept in them (`keep`).
    deletes: Literal["follow", "keep"] = "follow"

    #: How far a delayed stream stays behind the clock, so that events of all partitions can arrive.
    delay_s: float = 5.0
    #: How often a delayed stream reads a recent time range again, for events that arrived late.
    back_track_interval_s: float = 1.0
    #: How far back a delayed stream reads again; `max` is to the start of the previous bucket.
    back_track_period_s: float | Literal["max"] = 5.0
    #: How long a delayed stream searches for a missing event before it fails.
    missing_timeout_s: float = 10.0
    #: How long a delayed stream that starts in the middle searches a journal for events before the first one found.
    new_persistence_id_scan_timeout_s: float = 0.5

    def __post_init__(self) -> None:
        if self.page_events < 1:
            raise InvalidInput(f"[tags] page_events must be at least 1, not {self.page_events}")
        for name in (
            "poll_s", "delay_s", "back_track_interval_s", "back_track_period_s", "missing_timeout_s",
            "new_persistence_id_scan_timeout_s",
        ):  # fmt: skip
            value = getattr(self, name)
            if value != "max" and value < 0:
                raise InvalidInput(f"[tags] {name} must be at least 0 seconds, not {value}")
