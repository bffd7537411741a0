"""Acts of the console, which are what its forms do: each declares its form, its dry run and its effect."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from tidebook.api.route import Route
from tidebook.api.routes import BY_NAME
from tidebook.server.console.page import NoFields

#: The names of form fields that hold a payload.
CONTENT_FIELDS = frozenset({"payload", "metadata", "data"})


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
    #: What identifies the things that would be affected: a confirmation does not hold for the same number of others.
    members: Sequence[Any] = ()
    #: Further fields of the act's form that the form of the confirmation sends.
    fields: dict[str, str] = {}

    @property
    def seal(self) -> str:
        """A digest of what is confirmed: the sentence that is shown, the count, and the members."""
        return blake2b(msgspec.json.encode([self.text, self.count, self.members]), digest_size=16).hexdigest()


class Act(msgspec.Struct, frozen=True):
    """What a form of the console does; the role, the scope and the audit are those of its route."""

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
    return Act(name, label, BY_NAME[name], run, form, preview)
