"""The settings of the server, section [server] of `tidebook.toml`."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from tidebook.api.access import Role

#: A body that anyone may send, even without a token: that of a sign-in.
PUBLIC_BODY_BYTES_MAX: Final = 10_000
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bounds of the server."""

    #: Names that the Host header may have; on a loopback address, its names are allowed too. Without this option, a
    #: server on another address accepts all names.
    allowed_hosts: tuple[str, ...] = ()
    #: The largest body of a request.
    body_bytes_max: Positive = 16_000_000
    #: The timeout of a request that has no Request-Timeout header.
    request_s: Seconds = 30.0
    #: The longest timeout that a Request-Timeout header may set.
    request_s_max: Seconds = 120.0
    #: How long a client may take to accept a part of a response; then the connection is closed.
    send_s: Seconds = 30.0
    #: How often an idle stream sends a comment, so that proxies keep it open.
    keepalive_s: Seconds = 15.0
    #: Open streams of the server.
    streams_max: Positive = 5_000
    #: Concurrent streams per token.
    streams_per_token_max: Positive = 2_000
    #: Open connections.
    connections_max: Positive = 10_000
    #: Requests per second that one token, or one client without a token, may send; 0 means no limit.
    rate_per_s: Annotated[float, Meta(ge=0)] = 0.0
    #: How many requests of one sender may arrive at once, if `rate_per_s` limits them.
    rate_burst: Positive = 1_000
    #: How long the server still accepts requests after SIGTERM, while it reports that it is not ready.
    drain_s: Annotated[float, Meta(ge=0, le=3_600)] = 0.0
    #: How long requests in flight may take to finish once the server accepts no new ones.
    shutdown_s: Seconds = 20.0
    #: How many responses to requests with an Idempotency-Key are kept.
    idempotency_keys_max: Positive = 100_000
    #: How long a response to a request with an Idempotency-Key is kept.
    idempotency_s: Seconds = 86_400.0
    #: How long an unused claim of a WAL region is held before it is released.
    region_idle_s: Seconds = 300.0
    #: Claims of WAL regions at the same time.
    region_sessions_max: Positive = 1_000
    #: How long a browser stays signed in.
    session_s: Annotated[float, Meta(gt=0, le=31_536_000)] = 43_200.0
    #: The folder below which exports are written; without it exports are refused.
    export_folder: str | None = None
    #: How many pipeline jobs may run at the same time.
    jobs_max: Positive = 1

    def body_limit(self, role: Role) -> int:
        """Return how many bytes the body of a request may have that needs this role."""
        return min(self.body_bytes_max, PUBLIC_BODY_BYTES_MAX) if role is Role.PUBLIC else self.body_bytes_max
