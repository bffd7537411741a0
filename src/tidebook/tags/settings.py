"""What a user may set of tags: `[tags]` in tidebook.toml."""

from __future__ import annotations

from typing import Literal

import msgspec

Consistency = Literal["horizon", "delay"]


class TagSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How streams by tag are read."""

    consistency: Consistency = "horizon"
    page_events: int = 1000
    #: Without an offset a query begins here: an ISO date, such as the day of the first deployment.
    first_time_bucket: str = "2020-01-01"
    #: How long a query that follows waits at most before it looks again, where it is not woken.
    poll_s: float = 1.0
