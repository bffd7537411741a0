"""How numbers, sizes, durations and times are written, in sentences and by templates, and how typed times are read."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from tidebook.core.errors import InvalidInput

_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")
_SPANS: Final = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"), (0.001, "ms"))


def number(value: float | None) -> str:
    """Return a number with separators; a dash if there is none."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"


def counted(count: int, one: str, many: str = "") -> str:
    """Return a number with its noun: "1 event", "2 events"; give the plural if it is irregular."""
    return f"1 {one}" if count == 1 else f"{count:,} {many or f'{one}s'}"


def size(value: float | None) -> str:
    """Return a number of bytes with its unit."""
    if value is None:
        return "–"
    amount, unit = float(value), 0
    while amount >= 1000 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1000, unit + 1
    return f"{amount:,.0f} B" if unit == 0 else f"{amount:,.1f} {_UNITS[unit]}"


def span(seconds: float | None) -> str:
    """Return a duration in its largest unit."""
    if seconds is None:
        return "–"
    for length, unit in _SPANS:
        if seconds >= length:
            digits = 0 if unit == "ms" else 1
            return f"{seconds / length:,.{digits}f}".removesuffix(".0") + f" {unit}"
    return "< 1 ms" if seconds > 0 else "0 s"


def span_ms(milliseconds: float | None) -> str:
    """Return a duration, given in milliseconds, in its largest unit."""
    return span(None if milliseconds is None else milliseconds / 1000)


def moment(value: float | datetime | None) -> str:
    """Return a time in UTC, to the millisecond; numbers are milliseconds since 1970."""
    if value is None:
        return "–"
    try:
        at = value if isinstance(value, datetime) else datetime.fromtimestamp(value / 1000, UTC)
    except (OverflowError, OSError, ValueError):
        return f"{value} ms"
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.") + f"{at.microsecond // 1000:03d}"


def iso(time_ms: int) -> str:
    """Return a time as a parameter of an address; empty if it is outside the range of dates."""
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00")
    except (OverflowError, OSError, ValueError):
        return ""


def parse_time(text: str) -> int:
    """Return the milliseconds of an ISO date; without a time zone it is in UTC."""
    try:
        found = datetime.fromisoformat(text.strip())
        return round((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        raise InvalidInput(f"a time must be an ISO date such as 2026-01-31T12:00, not {text[:40]!r}") from error
