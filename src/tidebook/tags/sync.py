"""Streams by tag for threads without an event loop: the same names, without await."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from types import TracebackType

from tidebook.core.buckets import Buckets
from tidebook.core.errors import Unavailable
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.tags.event import TaggedEvent
from tidebook.tags.horizon import Horizon, HorizonStatus, OnWaiting
from tidebook.tags.rebuild import Rebuilt
from tidebook.tags.settings import Consistency
from tidebook.tags.subscription import LEASE_S, Offsets, Subscription
from tidebook.tags.tags import Tags


class SyncSubscription:
    """The blocking form of `Subscription`, with the same methods."""

    def __init__(self, portal: BlockingPortal, subscription: Subscription) -> None:
        self._portal = portal
        self._subscription = subscription

    def __enter__(self) -> SyncSubscription:
        self._portal.run(self._subscription.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._portal.run(self._subscription.__aexit__(kind, error, trace))

    def __iter__(self) -> Iterator[TaggedEvent]:
        # One event per call: an event read ahead may belong to another member by the time it is handled.
        events = aiter(self._subscription)

        async def following() -> TaggedEvent | None:
            return await anext(events, None)

        while (event := self._portal.run(following())) is not None:
            try:
                yield event
            except BaseException:
                with suppress(Unavailable):  # a closed book has closed the iterator already
                    self._portal.run(events.aclose())
                raise

    @property
    def shares(self) -> frozenset[int]:
        return self._subscription.shares

    @property
    def waiting(self) -> HorizonStatus | None:
        return self._subscription.waiting

    def commit(self, event: TaggedEvent) -> None:
        self._portal.run(self._subscription.commit(event))


class SyncTags:
    """The blocking form of `Tags`, with the same methods."""

    def __init__(self, portal: BlockingPortal, tags: Tags) -> None:
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
        on_waiting: OnWaiting | None = None,
    ) -> Iterator[TaggedEvent]:
        return self._portal.iterate(
            self._tags.read(
                tag, after=after, follow=follow, topics=topics, consistency=consistency, on_waiting=on_waiting
            )
        )

    def subscribe(
        self,
        tag: str,
        group: str,
        *,
        topics: Iterable[str] | None = None,
        follow: bool = True,
        offsets: Offsets | None = None,
        lease_s: float = LEASE_S,
        on_waiting: OnWaiting | None = None,
    ) -> SyncSubscription:
        member = self._tags.subscribe(
            tag, group, topics=topics, follow=follow, offsets=offsets, lease_s=lease_s, on_waiting=on_waiting
        )
        return SyncSubscription(self._portal, member)

    def set_bucket_size(self, size: str) -> Buckets:
        return self._portal.run(self._tags.set_bucket_size(size))

    def buckets(self) -> Buckets:
        return self._portal.run(self._tags.buckets())

    def rebuild(self, tag: str, *, topics: Iterable[str] | None = None) -> Rebuilt:
        return self._portal.run(self._tags.rebuild(tag, topics=topics))

    def horizon(self, topics: Iterable[str] | None = None) -> Horizon:
        return self._portal.run(self._tags.horizon(topics))

    def status(self, topics: Iterable[str] | None = None) -> HorizonStatus:
        return self._portal.run(self._tags.status(topics))

    def list(self) -> Iterator[str]:
        return self._portal.iterate(self._tags.list())
