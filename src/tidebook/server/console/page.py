"""Pages and acts of the console: each declares its path, and the route of the API whose role and scope it has."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from tidebook.api.route import Route
from tidebook.api.routes import BY_NAME
from tidebook.server.responses import Chunk

#: Turns a row of a live view into one line of HTML.
RenderRow = Callable[[Any], bytes]
#: The query parameter or form field that a token's prefix must cover, by scope of the route.
NAMED_SCOPES = ("topic", "queue", "namespace")
#: The names of form fields that hold a payload.
CONTENT_FIELDS = frozenset({"payload", "metadata", "data"})


class NoFields(msgspec.Struct, frozen=True):
    """A page or an act without parameters."""


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A page: its data is shown by a template, and by its twin, whose path ends with `.json`."""

    name: str
    path: str
    #: The route of the API that shows the same: the page has its role and its scope.
    route: Route
    read: Callable[[Any], Awaitable[Any]]
    template: str
    query: type[msgspec.Struct] = NoFields

    @property
    def twin(self) -> str:
        """The path of the page's data as JSON."""
        return "/overview.json" if self.path == "/" else f"{self.path}.json"


class ActResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an act, as a sentence, and the page to show next: by default the one that it was started from."""

    message: str
    to: str | None = None
    #: A secret that is shown once, in the response itself.
    secret: str | None = None
    #: Further headers of the response.
    headers: tuple[tuple[str, str], ...] = ()
    #: Whether something was changed; an act that changes nothing is not audited.
    changed: bool = True


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a dry run: the effect that an act would have."""

    #: A sentence with the exact number of what would be affected.
    text: str
    count: int
    #: The text to type, so that the act is not done by mistake; None if a click is enough.
    word: str | None = None
    #: A few of the things that would be affected.
    sample: list[str] = []
    #: The identities of what would be affected, so that a confirmation is not valid for the same number of others.
    members: Sequence[Any] = ()
    #: Fields of the act's form that the confirmation sends in addition.
    fields: dict[str, str] = {}

    @property
    def seal(self) -> str:
        """A digest of what is confirmed: the sentence that is shown, the count, and the members."""
        return blake2b(msgspec.json.encode([self.text, self.count, self.members]), digest_size=16).hexdigest()


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a form of the console does: it has the role, the scope and the audit of its route."""

    name: str
    label: str
    route: Route
    run: Callable[[Any], Awaitable[ActResult]]
    form: type[msgspec.Struct] = NoFields
    #: The dry run; an act that has one is confirmed on a separate page.
    preview: Callable[[Any], Awaitable[Preview]] | None = None

    @property
    def content(self) -> frozenset[str]:
        """The fields of the form that hold a payload, which the audit does not record."""
        return CONTENT_FIELDS.intersection(self.form.__struct_fields__)

    @property
    def path(self) -> str:
        """The path to which the form is sent, and at which the dry run is shown."""
        return f"/acts/{self.name}"


def api_act(
    name: str,
    label: str,
    run: Callable[[Any], Awaitable[ActResult]],
    form: type[msgspec.Struct] = NoFields,
    preview: Callable[[Any], Awaitable[Preview]] | None = None,
) -> Act:
    """Return an act that does the same as the route of this name."""
    return Act(name=name, label=label, route=BY_NAME[name], run=run, form=form, preview=preview)


def scope_name(route: Route, fields: msgspec.Struct) -> str | None:
    """Return the topic, queue or namespace that a request names, for the check of a token's prefix."""
    return getattr(fields, route.scope) if route.scope in NAMED_SCOPES else None


class LiveView(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that a page follows: `follow` yields them rendered, each with the id from which a browser continues."""

    name: str
    path: str
    route: Route
    follow: Callable[[Any, RenderRow], Awaitable[AsyncGenerator[Chunk, None]]]
    #: The template of one row.
    template: str
    query: type[msgspec.Struct]


class Catalog(msgspec.Struct, frozen=True):
    """All pages, acts and live views by name."""

    pages: dict[str, Page]
    acts: dict[str, Act]
    lives: dict[str, LiveView]
