"""Recover a region's state, follow its log, and claim the region for writing."""

from __future__ import annotations

from typing import assert_never

from tidebook.core.errors import Fenced, LogLost, OutcomeUnknown, Unavailable
from tidebook.wal.meta import RegionMeta
from tidebook.wal.record import OwnerClaim
from tidebook.wal.recovery import EntriesLost, FullScan, Resume, lost_entries, plan_recovery
from tidebook.wal.snapshot import restore_meta
from tidebook.wal.topics import OnRecord, RegionTopics

#: How often a recovery or a read restarts because a cleaner truncated the log meanwhile.
RECOVERY_ATTEMPTS_MAX = 100


async def recover(topics: RegionTopics, *, on_record: OnRecord | None = None) -> RegionMeta:
    """Restore the newest snapshot and scan the records after it; raise `LogLost` with the range that is missing.

    A cleaner writes its snapshots before it truncates. Therefore the start of the log is read first: the snapshots read
    after it cover all that was truncated before it, and a gap between them is a loss. If the log is truncated during
    the scan, the recovery starts again.
    """
    for _ in range(RECOVERY_ATTEMPTS_MAX):
        start = await topics.start()
        stored = (await topics.snapshots()).stored
        end = await topics.end()
        match plan_recovery(stored, topic_id=topics.topic_id, log_start=start, log_end=end):
            case EntriesLost() as lost:
                raise topics.lost_error(lost)
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
            raise topics.lost_error(missing)
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


async def claim_region(topics: RegionTopics, meta: RegionMeta, writer: bytes, *, attempts_max: int) -> int:
    """Claim the next term for a writer, fold up to the claim, and return the term.

    Raise `Fenced` if other writers won every attempt. The state before the claim only selects the term; the state to
    write on is the one as of the claim.
    """
    for _ in range(attempts_max):
        term = meta.term + 1
        await claim(topics, meta, OwnerClaim(term, writer), attempts_max=attempts_max)
        if (meta.term, meta.writer) == (term, writer):
            return term
    raise Fenced(
        f"{topics.data}: {attempts_max} claims in a row lost against another writer's: is it opened over and over?"
    )


async def claim(
    topics: RegionTopics, meta: RegionMeta, wanted: OwnerClaim, *, attempts_max: int, on_record: OnRecord | None = None
) -> None:
    """Append a claim and fold up to it. A duplicate is the same claim, so an unknown outcome is safe to retry."""
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
