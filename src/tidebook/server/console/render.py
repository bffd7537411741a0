"""Turns the data of a page into HTML: the templates, the files that they load, and links between pages."""

from __future__ import annotations

from datetime import datetime
from hashlib import blake2b
from importlib.resources import files
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from tidebook.server.console.formatting import counted, iso, moment, number, size, span, span_ms


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
