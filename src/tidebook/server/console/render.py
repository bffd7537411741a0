"""Turns the data of a page into HTML: the templates, and how numbers, sizes and times are written."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import blake2b
from importlib.resources import files
from typing import Any, Final
from urllib.parse import urlencode

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

#: Counts above this are estimates.
EXACT_MAX: Final = 10_000
_UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")
_SPANS: Final = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"), (0.001, "ms"))


class Count(msgspec.Struct, frozen=True):
    """A number of things; above `EXACT_MAX` it is an estimate, and says so."""

    value: int
    exact: bool = True

    def __str__(self) -> str:
        return f"{self.value:,}" if self.exact else f"over {self.value:,}"


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


def link(path: str, **fields: Any) -> str:
    """Return the address of a page with its parameters; those that are None are left out."""
    given = [(name, _parameter(value)) for name, value in fields.items() if value is not None and value != ""]
    return f"{path}?{urlencode(given)}" if given else path


def _parameter(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value)


def static_files() -> dict[str, bytes]:
    """Return the files that the pages load, by name."""
    folder = files("tidebook.server.console") / "static"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


class Renderer:
    """The templates; values are escaped wherever they are used."""

    def __init__(self, static: dict[str, bytes]) -> None:
        self._environment = Environment(
            loader=PackageLoader("tidebook.server.console"),
            autoescape=select_autoescape(default=True, default_for_string=True),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters.update(
            number=number, counted=counted, size=size, span=span, span_ms=span_ms, moment=moment, iso=iso
        )
        versions = {name: blake2b(body, digest_size=6).hexdigest() for name, body in static.items()}
        # The version in the address lets browsers keep a file forever.
        self._environment.globals.update(link=link, static=lambda name: f"/static/{versions[name]}/{name}")

    def __call__(self, template: str, **context: Any) -> bytes:
        """Return a page as UTF-8; a lone surrogate, which UTF-8 cannot hold, becomes a question mark."""
        return self._environment.get_template(template).render(**context).encode(errors="replace")
