"""The query and the response of the history."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class HistoryQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Selects the samples after a time."""

    since_ms: Annotated[int, Meta(ge=0, le=2**53)] = 0


class HistorySample(msgspec.Struct, frozen=True):
    """The values at a time, in the order of the response's names; null if there was none."""

    at_ms: int
    values: list[float | None]


class HistoryResponse(msgspec.Struct, frozen=True):
    """The samples of the last hours, oldest first. Counters start again at 0 with each process of the server."""

    every_s: float
    names: list[str]
    samples: list[HistorySample]
