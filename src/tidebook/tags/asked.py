"""What a caller asks of streams by tag: which tag, and of which topics."""

from __future__ import annotations

from collections.abc import Iterable

from tidebook.core.errors import InvalidInput
from tidebook.core.payload import encode_text


def check_tag(tag: object) -> None:
    """Refuse what no event can carry."""
    if type(tag) is not str or not tag:
        raise InvalidInput("a tag is a text that is not empty")
    encode_text(tag, "a tag")


def asked_topics(topics: Iterable[str] | None) -> frozenset[str] | None:
    """The topics that are meant; a text is one topic, never its letters. None: all of them."""
    if topics is None:
        return None
    return frozenset([topics] if isinstance(topics, str) else topics)
