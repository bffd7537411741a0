"""Responses of the health checks."""

from __future__ import annotations

import msgspec


class LiveResponse(msgspec.Struct, frozen=True):
    """The process responds."""

    live: bool
    version: str
    uptime_s: float
    #: The server's clock; None from a server of an older version.
    time_ms: int | None = None


class CheckResponse(msgspec.Struct, frozen=True):
    """Whether one part of the book is ready, and if not, why."""

    name: str
    ok: bool
    reason: str | None = None


class ReadyResponse(msgspec.Struct, frozen=True):
    """Whether requests should be sent to this server, with the reasons."""

    ready: bool
    draining: bool
    checks: list[CheckResponse]
