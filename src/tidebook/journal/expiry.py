"""Purge an expired journal, unless an append came first."""

from __future__ import annotations

from tidebook.core.action import Purge
from tidebook.core.errors import OutcomeUnknown, TidebookError
from tidebook.core.fold import PurgeApplied
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.journal.head_cache import HeadCache
from tidebook.journal.tail import JournalTail
from tidebook.log.port import Acknowledged


async def purge_if_at(cache: HeadCache, key: Key, position: Position) -> bool:
    """Purge the journal if its head is at `position`; return whether the purge took effect.

    The purge record carries the position, so the order of the log decides between it and a concurrent append. If the
    head is known to be elsewhere already, nothing is sent: a purge that awaits replication is not repeated.
    """
    head, as_of = await _head_as_of(cache, key)
    if head is None or not head.live or head.position != position:
        return False
    sent, change = await cache.write(Purge(cache.config.epoch, position), key.id)
    if change is not None:
        return isinstance(change, PurgeApplied)
    try:
        return await _is_purged_by(cache, key, head, as_of, sent)
    except TidebookError as error:
        raise OutcomeUnknown(
            f"{key}: the purge is in the log at offset {sent.offset}, but whether it counts could not be learned: "
            f"{error}",
            partition=sent.partition,
            offset=sent.offset,
        ) from error


async def _head_as_of(cache: HeadCache, key: Key) -> tuple[Head | None, int]:
    """Return the head and the offset as of which it is exact.

    The loop is needed because the tail may advance, or the head be evicted, before this coroutine resumes.
    """
    while True:
        await cache.head(key.id)
        if cache.known(key.id):
            return cache.cached(key.id), cache.next_offset - 1


async def _is_purged_by(cache: HeadCache, key: Key, head: Head, as_of: int, sent: Acknowledged) -> bool:
    """Return whether the purge took effect, by folding the records after the head up to the purge."""
    await cache.reach(sent.offset, follow=False)
    tail = JournalTail(head, cache.config, bytes_max=0)
    await cache.fold_tail(key, tail, after=as_of, to=sent.offset)
    return tail.head is not None and not tail.head.live and tail.head.position.offset == sent.offset
