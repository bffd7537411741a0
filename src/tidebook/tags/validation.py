"""Validation of the arguments of streams by tag."""

from __future__ import annotations

from collections.abc import Iterable

from tidebook.core.errors import InvalidInput
from tidebook.core.key import topic_name
from tidebook.core.payload import encode_text


def check_tag(tag: object) -> None:
    """Raise `InvalidInput` for a tag that no event can have."""
    if type(tag) is not str or not tag:
        raise InvalidInput("a tag is a text that is not empty")
    encode_text(tag, "a tag")


def check_topics(topics: Iterable[str] | None) -> frozenset[str] | None:
    """Return the topics as a set, None for all; reject a bare text, which would be a list of letters."""
    if topics is None:
        return None
    if isinstance(topics, str | bytes):
        raise InvalidInput(f"topics is a list of names, not a text: write topics=[{topics!r}]")
    names = frozenset(topics)
    for name in names:
        topic_name(name)
    return names
