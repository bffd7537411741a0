"""Request and response of `GET /v1/history`: recent samples of the server's metrics."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class HistoryQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Selects the samples after a time."""

    since_ms: Annotated[int, Meta(ge=0, le=2**53)] = 0


class HistorySample(msgspec.Struct, frozen=True):
    """The values at a time, in the order of the response's names; null for a metric that had no value then."""

    at_ms: int
    values: list[float | None]


class HistoryResponse(msgspec.Struct, frozen=True):
    """Samples of the last six hours, oldest first. Counters restart at 0 when the server restarts."""

    every_s: float
    names: list[str]
    samples: list[HistorySample]
