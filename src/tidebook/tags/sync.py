"""Streams by tag for threads without a loop: the same names, without await."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from tidebook.core.portal import Portal
from tidebook.tags.event import TaggedEvent
from tidebook.tags.tags import Tags


class SyncTags:
    """See `Tags` for what each name does."""

    def __init__(self, portal: Portal, tags: Tags) -> None:
        self._portal = portal
        self._tags = tags

    def read(
        self,
        tag: str,
        *,
        after: str | datetime | None = None,
        follow: bool = False,
        topics: Iterable[str] | None = None,
    ) -> Iterator[TaggedEvent]:
        return self._portal.iterate(self._tags.read(tag, after=after, follow=follow, topics=topics))

    def list(self) -> Iterator[str]:
        return self._portal.iterate(self._tags.list())
