"""Recovering a region's meta, following its log, and taking the region over."""

from __future__ import annotations

from typing import assert_never

from tidebook.core.errors import Fenced, LogLost, OutcomeUnknown, Unavailable
from tidebook.wal.meta import RegionMeta
from tidebook.wal.record import Claim
from tidebook.wal.recovery import FullScan, Lost, Resume, lost_entries, plan_recovery
from tidebook.wal.snapshot import restore_meta
from tidebook.wal.topics import OnRecord, RegionTopics

#: How often a cleaner may be quicker than a recovery before that gives up.
LOOKS_MAX = 100


async def recover(topics: RegionTopics, *, on_record: OnRecord | None = None) -> RegionMeta:
    """The last good snapshot, then a scan of what came after it. Raises LogLost with the range that is missing.

    A cleaner syncs its snapshots before it cuts. So the log's start is asked for first: what is read after that holds
    all that this start needs, and only a start past it is a loss. One that moves on later means another look.
    """
    for _ in range(LOOKS_MAX):
        start = await topics.start()
        stored = (await topics.snapshots()).stored
        end = await topics.end()
        match plan_recovery(stored, topic_id=topics.topic_id, log_start=start, log_end=end):
            case Lost() as lost:
                raise topics.lost(lost)
            case Resume(snapshot):
                meta = restore_meta(snapshot)
            case FullScan():
                meta = RegionMeta()
            case other:
                assert_never(other)
        try:
            await topics.scan(meta, stop=end, on_record=on_record)
        except LogLost:
            continue
        missing = lost_entries(meta, start)
        if missing is not None:
            raise topics.lost(missing)
        return meta
    raise Unavailable(f"{topics.data}: cleaned {LOOKS_MAX} times in a row while it was recovered: open it again")


async def follow(topics: RegionTopics, meta: RegionMeta, *, stop: int, on_record: OnRecord | None = None) -> None:
    """Fold the records from where the meta stands up to `stop`; recover anew where a cleaner has cut them away.

    After that `meta.restored_at` has changed: `on_record` was told of the records from there on, of none before.
    """
    for _ in range(LOOKS_MAX):
        try:
            await topics.scan(meta, stop=stop, on_record=on_record)
            return
        except LogLost as error:
            fresh = await recover(topics, on_record=on_record)
            if fresh.next_offset <= meta.next_offset:
                raise error
            meta.become(fresh)
    raise Unavailable(f"{topics.data}: cleaned {LOOKS_MAX} times in a row while it was read: try again")


async def take_over(topics: RegionTopics, meta: RegionMeta, writer: bytes, *, attempts_max: int) -> int:
    """Claim the next term and fold up to the claim; the term that is in force then, for this writer.

    The scan before only chose the term: what counts is the meta as of the claim.
    """
    for _ in range(attempts_max):
        term = meta.term + 1
        await claim(topics, meta, Claim(term, writer), attempts_max=attempts_max)
        if (meta.term, meta.writer) == (term, writer):
            return term
    raise Fenced(
        f"{topics.data}: {attempts_max} claims in a row lost against another writer's: is it opened over and over?"
    )


async def claim(
    topics: RegionTopics, meta: RegionMeta, wanted: Claim, *, attempts_max: int, on_record: OnRecord | None = None
) -> None:
    """Append a claim and fold up to it. A repeated one is the same claim, so an unknown outcome may be tried again."""
    for attempt in range(1, attempts_max + 1):
        try:
            sent = await topics.append(wanted)
            break
        except (Unavailable, OutcomeUnknown):
            if attempt == attempts_max:
                raise
    else:
        raise AssertionError("attempts_max is at least 1")
    await follow(topics, meta, stop=sent.offset + 1, on_record=on_record)
