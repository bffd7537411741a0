"""The headers of a request that the server reads, collected in one pass."""

from __future__ import annotations

from collections.abc import Iterable

_READ = {
    b"accept": "accept",
    b"authorization": "authorization",
    b"content-length": "content_length",
    b"content-type": "content_type",
    b"cookie": "cookie",
    b"host": "host",
    b"idempotency-key": "idempotency_key",
    b"last-event-id": "last_event_id",
    b"origin": "origin",
    b"request-timeout": "request_timeout",
    b"sec-fetch-site": "sec_fetch_site",
    b"traceparent": "traceparent",
    b"x-csrf-token": "csrf_token",
}


class Headers:
    """Header values by name; a header that was not sent is None."""

    accept: str | None = None
    authorization: str | None = None
    content_length: str | None = None
    content_type: str | None = None
    cookie: str | None = None
    host: str | None = None
    idempotency_key: str | None = None
    last_event_id: str | None = None
    origin: str | None = None
    request_timeout: str | None = None
    sec_fetch_site: str | None = None
    traceparent: str | None = None
    csrf_token: str | None = None

    def __init__(self, raw: Iterable[tuple[bytes, bytes]]) -> None:
        for name_bytes, value in raw:
            if (known := _READ.get(name_bytes)) is not None:
                setattr(self, known, value.decode("latin-1"))

    def cookie_value(self, wanted: str) -> str | None:
        """Return the value of a cookie, or None if it was not sent."""
        for part in (self.cookie or "").split(";"):
            name, _, value = part.strip().partition("=")
            if name == wanted:
                return value
        return None
