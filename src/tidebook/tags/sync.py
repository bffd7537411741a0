"""Events by tag for threads without an event loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Generic, overload

from tidebook.core.errors import Unavailable
from tidebook.runtime.blocking_facade import BlockingFacade, blocking, forwarded, iterating
from tidebook.tags.event import E, TaggedEvent
from tidebook.tags.horizon import OnWaiting
from tidebook.tags.subscription import LEASE_S, Offsets, Subscription
from tidebook.tags.tags import Tags


class SyncSubscription(BlockingFacade[Subscription[E]], Generic[E]):
    """The blocking form of `Subscription`."""

    def __enter__(self) -> SyncSubscription[E]:
        self._portal.run(self._target.__aenter__())
        return self

    __exit__ = blocking(Subscription.__aexit__)

    def __iter__(self) -> Iterator[TaggedEvent[E]]:
        # One event per call: an event read ahead may belong to another member by the time it is handled.
        events = aiter(self._target)

        async def following() -> TaggedEvent[E] | None:
            return await anext(events, None)

        while (event := self._portal.run(following())) is not None:
            try:
                yield event
            except BaseException:
                with suppress(Unavailable):  # a closed book has closed the iterator already
                    self._portal.run(events.aclose())
                raise

    shares = forwarded(Subscription[Any].shares)
    waiting = forwarded(Subscription[Any].waiting)
    commit = blocking(Subscription.commit)


class SyncTags(BlockingFacade[Tags]):
    """The blocking form of `Tags`."""

    read = iterating(Tags.read)

    @overload
    def subscribe(
        self, tag: str, group: str, *, events: Iterable[type[E]], topics: Iterable[str] | None = None,
        follow: bool = True, offsets: Offsets | None = None, lease_s: float = LEASE_S,
        on_waiting: OnWaiting | None = None,
    ) -> SyncSubscription[E]: ...  # fmt: skip
    @overload
    def subscribe(
        self, tag: str, group: str, *, events: Iterable[type] | None = None, topics: Iterable[str] | None = None,
        follow: bool = True, offsets: Offsets | None = None, lease_s: float = LEASE_S,
        on_waiting: OnWaiting | None = None,
    ) -> SyncSubscription[Any]: ...  # fmt: skip
    def subscribe(
        self,
        tag: str,
        group: str,
        *,
        events: Iterable[type[Any]] | None = None,
        topics: Iterable[str] | None = None,
        follow: bool = True,
        offsets: Offsets | None = None,
        lease_s: float = LEASE_S,
        on_waiting: OnWaiting | None = None,
    ) -> SyncSubscription[Any]:
        """Return a member of a group that shares the journals of a tag. See `Tags.subscribe` for the arguments."""
        member = self._target.subscribe(
            tag, group, events=events, topics=topics, follow=follow, offsets=offsets, lease_s=lease_s,
            on_waiting=on_waiting,
        )  # fmt: skip
        return SyncSubscription(self._portal, member)

    set_bucket_size = blocking(Tags.set_bucket_size)
    buckets = blocking(Tags.buckets)
    rebuild = blocking(Tags.rebuild)
    horizon = blocking(Tags.horizon)
    status = blocking(Tags.status)
    list = iterating(Tags.list)
