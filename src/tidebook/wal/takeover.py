"""Recovering a region's meta, and taking the region over."""

from __future__ import annotations

from typing import assert_never

from tidebook.core.errors import Fenced, LogLost, OutcomeUnknown, Unavailable
from tidebook.wal.meta import RegionMeta
from tidebook.wal.record import Claim
from tidebook.wal.recovery import FullScan, Lost, Resume, lost_entries, plan_recovery
from tidebook.wal.snapshot import restore_meta
from tidebook.wal.topics import OnRecord, RegionTopics

#: A cleaner may move the log's start on between two looks, so a loss is believed only when it was seen so often.
LOOKS_MAX = 3


async def recover(topics: RegionTopics) -> RegionMeta:
    """The last good snapshot, then a scan of what came after it. Raises LogLost with the range that is missing."""
    failure: LogLost | None = None
    for _ in range(LOOKS_MAX):
        stored = (await topics.snapshots()).stored
        bounds = await topics.bounds()
        match plan_recovery(stored, topic_id=topics.topic_id, log_start=bounds.start, log_end=bounds.end):
            case Lost() as lost:
                failure = topics.lost(lost)
                continue
            case Resume(snapshot):
                meta = restore_meta(snapshot)
            case FullScan():
                meta = RegionMeta()
            case other:
                assert_never(other)
        try:
            await topics.scan(meta, stop=bounds.end)
        except LogLost as error:
            failure = error
            continue
        missing = lost_entries(meta, (await topics.bounds()).start)
        if missing is None:
            return meta
        failure = topics.lost(missing)
    assert failure is not None
    raise failure


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
    await topics.scan(meta, stop=sent.offset + 1, on_record=on_record)
