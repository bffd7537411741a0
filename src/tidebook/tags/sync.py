"""Events by tag for threads without an event loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Generic

from tidebook.core.errors import Unavailable
from tidebook.runtime.blocking_facade import BlockingFacade, blocking, forwarded, iterating, part
from tidebook.tags.event import E, TaggedEvent
from tidebook.tags.subscription import Subscription
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
    subscribe = part(SyncSubscription, Tags.subscribe)
    set_bucket_size = blocking(Tags.set_bucket_size)
    buckets = blocking(Tags.buckets)
    rebuild = blocking(Tags.rebuild)
    horizon = blocking(Tags.horizon)
    status = blocking(Tags.status)
    list = iterating(Tags.list)
