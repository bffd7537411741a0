"""Pages of the console: each declares its path, and the route of the API whose role and scope it has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from tidebook.api.route import Route

#: The scopes of routes whose object is the query parameter or form field of the same name.
NAMED_SCOPES = ("topic", "queue", "namespace")


class NoFields(msgspec.Struct, frozen=True):
    """A page or an act without parameters."""


class Page(msgspec.Struct, frozen=True):
    """A page: its data is shown by the template of its name, and by its twin, whose path ends with `.json`."""

    name: str
    #: The route of the API that shows the same: the page has its role and its scope.
    route: Route
    read: Callable[[Any], Awaitable[Any]]
    query: type[msgspec.Struct] = NoFields

    @property
    def path(self) -> str:
        """The path of the page."""
        return "/" if self.name == "overview" else f"/{self.name.replace('_', '-')}"

    @property
    def template(self) -> str:
        """The file of the page's template."""
        return f"{self.name}.html"

    @property
    def twin(self) -> str:
        """The path of the page's data as JSON."""
        return f"/{self.name.replace('_', '-')}.json"


def scope_name(route: Route, fields: msgspec.Struct) -> str | None:
    """Return the topic, queue or namespace that a request names, for the check of a token's prefix."""
    return getattr(fields, route.scope) if route.scope in NAMED_SCOPES else None
