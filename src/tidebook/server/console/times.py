"""Times as a person types them."""

from __future__ import annotations

from datetime import UTC, datetime

from tidebook.core.errors import InvalidInput


def parse_time(text: str) -> int:
    """Return the milliseconds of an ISO date; without a time zone it is in UTC."""
    try:
        moment = datetime.fromisoformat(text.strip())
        return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        raise InvalidInput(f"a time must be an ISO date such as 2026-01-31T12:00, not {text[:40]!r}") from error
