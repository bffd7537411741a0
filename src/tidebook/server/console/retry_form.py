"""The form on the page of a problem, in which a person corrects the input instead of typing it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from tidebook.server.console.act import Act
from tidebook.server.console.page import Page

#: The statuses of problems that corrected input may solve: invalid input, or a conflict with the current state.
STATUSES: Final = frozenset({400, 409, 422})
#: The fields that a person types, with their labels; the others of a form stay as they are.
LABELS: Final = {
    "where": "Filter",
    "at": "From number",
    "offset": "From offset",
    "time": "From time (UTC)",
    "since": "From time (UTC)",
    "prefix": "Name",
    "key": "Key",
    "priority": "Priority",
    "after": "Due from (UTC)",
    "until": "Due until (UTC)",
    "reason": "Reason contains",
    "payload": "Payload",
    "metadata": "Metadata (a JSON object)",
    "data": "Data",
    "type": "Type",
    "tags": "Tags, separated by commas",
    "expected": "Only if the last number is",
    "process_at": "Due at (UTC)",
    "expires_at": "Expires at (UTC)",
    "topics": "Topics, separated by commas",
    "name": "Name",
    "days": "Days until it expires",
}
#: The labels of fields whose name means something else in other acts, by act and field.
ACT_LABELS: Final = {
    ("access.create_token", "prefix"): "Only names that begin with",
    ("journals.delete", "to"): "Up to number",
    ("pipeline.start", "to"): "Export to",
}


class TypedField(msgspec.Struct, frozen=True, kw_only=True):
    """A field of the form; one without a label is hidden."""

    name: str
    value: str
    label: str | None
    #: Whether it holds a payload, which may have several lines.
    is_text: bool


class RetryForm(msgspec.Struct, frozen=True, kw_only=True):
    """The form: the address to which it is sent, and the typed fields."""

    method: str
    action: str
    fields: list[TypedField]


def retry_form(target: Page | Act, method: str, given: Mapping[str, str]) -> RetryForm | None:
    """Return the form of a refused request; None if it has no field that a person types."""
    struct, content = (target.query, frozenset[str]()) if isinstance(target, Page) else (target.form, target.content)
    kept = ("back", *struct.__struct_fields__)
    fields = [
        TypedField(name=name, value=value, label=_label(target, name), is_text=name in content)
        for name, value in given.items()
        if name in kept
    ]
    if not any(each.label is not None for each in fields):
        return None
    return RetryForm(method=method.lower(), action=target.path, fields=fields)


def _label(target: Page | Act, field: str) -> str | None:
    return ACT_LABELS.get((target.name, field)) or LABELS.get(field)
