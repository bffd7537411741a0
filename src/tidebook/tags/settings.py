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
    #: A query without an offset starts here: an ISO date, such as the day of the first deployment.
    first_time_bucket: str = "2020-01-01"
    #: The longest wait of a live query before it reads again, if it is not notified.
    poll_s: float = 1.0
    #: Whether deleted and purged events leave their streams, or stay in them forever.
    deletes: Literal["follow", "keep"] = "follow"

    # With consistency = "delay":
    #: With delay: how far a query stays behind the clock, so that events of other partitions can arrive.
    delay_s: float = 5.0
    #: With delay: how often it searches for events that arrived later than that.
    back_track_interval_s: float = 1.0
    #: With delay: how far back it searches for them; "max" means to the start of the previous bucket.
    back_track_period_s: float | Literal["max"] = 5.0
    #: With delay: how long it searches for a missing event before the stream fails.
    missing_timeout_s: float = 10.0
    #: With delay: how long it searches for events before the first one seen of a journal.
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
                raise InvalidInput(f"[tags] {name} must be a time in seconds, not {value}")
