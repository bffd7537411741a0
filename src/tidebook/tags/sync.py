"""Streams by tag for threads without a loop: the same names, without await."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime

from tidebook.core.buckets import Buckets
from tidebook.core.portal import Portal
from tidebook.tags.event import TaggedEvent
from tidebook.tags.settings import Consistency
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
        consistency: Consistency | None = None,
    ) -> Iterator[TaggedEvent]:
        return self._portal.iterate(
            self._tags.read(tag, after=after, follow=follow, topics=topics, consistency=consistency)
        )

    def set_bucket_size(self, size: str) -> Buckets:
        return self._portal.run(self._tags.set_bucket_size(size))

    def buckets(self) -> Buckets:
        return self._portal.run(self._tags.buckets())

    def list(self) -> Iterator[str]:
        return self._portal.iterate(self._tags.list())
