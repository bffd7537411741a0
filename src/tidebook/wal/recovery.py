"""Recover a region's state, follow its log, and claim the region for writing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from tidebook.core.errors import Fenced, LogLost, OutcomeUnknown, TidebookError, Unavailable
from tidebook.wal.meta import RegionMeta
from tidebook.wal.record import OwnerClaim
from tidebook.wal.snapshot import RegionSnapshot, StoredSnapshotChunks, restore_meta
from tidebook.wal.topics import PARTITION, OnRecord, RegionTopics

#: How often a recovery or a read restarts because a cleaner truncated the log meanwhile.
RECOVERY_ATTEMPTS_MAX = 100

T = TypeVar("T")


def plan_recovery(
    stored: Sequence[StoredSnapshotChunks], *, topic: str, topic_id: str, log_start: int, log_end: int
) -> RegionSnapshot | None:
    """Return the snapshot that reaches furthest, or None to scan the whole log; raise `LogLost` if records are missing.

    >>> plan_recovery([], topic="wal.a.7.data", topic_id="x", log_start=0, log_end=5) is None
    True
    """
    if not stored:
        if log_start > 0:
            remedy = "there is no usable snapshot, so the whole log is needed: restore the meta topic"
            raise _lost(topic, 0, log_start - 1, remedy)
        return None
    best = max((each.snapshot for each in stored if each.snapshot.topic_id == topic_id), key=_reach, default=None)
    if best is None:
        other = max((each.snapshot for each in stored), key=_reach)
        remedy = "the data topic was made again under the same name: restore it, or delete the region's meta topic too"
        raise _lost(topic, other.truncated_to, max(other.truncated_to, other.data_offset - 1), remedy)
    if log_end < best.data_offset:
        raise _lost(topic, log_end, best.data_offset - 1, "the data topic ends before its snapshot: restore it")
    if log_start > best.data_offset:
        remedy = "only the cleaner may remove records: restore the data topic"
        raise _lost(topic, best.data_offset, log_start - 1, remedy)
    return best


def check_complete(topic: str, meta: RegionMeta, log_start: int) -> None:
    """Raise `LogLost` if the log no longer has records that tables still need."""
    if meta.first_offset < min(log_start, meta.next_offset):
        remedy = "entries that are not marked deleted were in it: restore the topic"
        raise _lost(topic, meta.first_offset, log_start - 1, remedy)


def _reach(snapshot: RegionSnapshot) -> tuple[int, int]:
    return snapshot.data_offset, snapshot.truncated_to


def _lost(topic: str, first: int, last: int, remedy: str) -> LogLost:
    when = "while they were needed"
    return LogLost(topic=topic, partition=PARTITION, first=first, last=last, remedy=remedy, when=when)


async def recover(topics: RegionTopics, *, on_record: OnRecord | None = None) -> RegionMeta:
    """Restore the newest snapshot and scan the records after it; raise `LogLost` with the range that is missing.

    A cleaner writes its snapshots before it truncates. Therefore the start of the log is read first: the snapshots read
    after it cover all that was truncated before it, and a gap between them is a loss. If the log is truncated during
    the scan, the recovery starts again.
    """
    for _ in range(RECOVERY_ATTEMPTS_MAX):
        start = await topics.start()
        stored = await topics.snapshots()
        end = await topics.end()
        best = plan_recovery(stored, topic=topics.data, topic_id=topics.topic_id, log_start=start, log_end=end)
        meta = RegionMeta() if best is None else restore_meta(best)
        try:
            await topics.scan(meta, stop=end, on_record=on_record)
        except LogLost:
            continue
        check_complete(topics.data, meta, start)
        return meta
    raise Unavailable(
        f"{topics.data}: cleaned {RECOVERY_ATTEMPTS_MAX} times in a row while it was recovered: open it again"
    )


async def follow(topics: RegionTopics, meta: RegionMeta, *, stop: int, on_record: OnRecord | None = None) -> None:
    """Fold the records from `meta.next_offset` up to `stop`; if a cleaner has truncated them, recover from a snapshot.

    A recovery changes `meta.restored_at`: `on_record` then saw every record from that offset on, but may have missed
    earlier ones.
    """
    for _ in range(RECOVERY_ATTEMPTS_MAX):
        try:
            await topics.scan(meta, stop=stop, on_record=on_record)
            return
        except LogLost as error:
            fresh = await recover(topics, on_record=on_record)
            if fresh.next_offset <= meta.next_offset:
                raise error
            meta.replace_with(fresh)
    raise Unavailable(f"{topics.data}: cleaned {RECOVERY_ATTEMPTS_MAX} times in a row while it was read: try again")


async def claim_region(topics: RegionTopics, meta: RegionMeta, writer: bytes, *, attempts_max: int) -> None:
    """Claim the next term for a writer and fold up to the claim; raise `Fenced` if other writers won every attempt.

    The state before the claim only selects the term; the state to write on is the one as of the claim.
    """
    for _ in range(attempts_max):
        claim = OwnerClaim(meta.term + 1, writer)
        await append_claim(topics, meta, claim, attempts_max=attempts_max)
        if (meta.term, meta.writer) == (claim.term, writer):
            return
    raise Fenced(
        f"{topics.data}: {attempts_max} claims in a row lost against another writer's: is it opened over and over?"
    )


async def append_claim(
    topics: RegionTopics, meta: RegionMeta, claim: OwnerClaim, *, attempts_max: int, on_record: OnRecord | None = None
) -> None:
    """Append a claim and fold up to it. A duplicate is the same claim, so an unknown outcome is safe to retry."""
    sent = await retry(lambda: topics.append(claim), attempts_max, Unavailable, OutcomeUnknown)
    await follow(topics, meta, stop=sent.offset + 1, on_record=on_record)


async def retry(call: Callable[[], Awaitable[T]], attempts_max: int, *errors: type[TidebookError]) -> T:
    """Return the result of the call, which is repeated at once after one of these errors."""
    for _ in range(attempts_max - 1):
        with suppress(*errors):
            return await call()
    return await call()
