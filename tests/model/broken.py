"""Broken rules of replication, each of which the search must find: this shows that the tests can fail."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from tests.model.lww import HeadTombstone, Interned, Listed, ListTombstone, Single, Tombstone, singles_of
from tests.model.world import Stages, in_stages
from tidebook.core.action import Delete
from tidebook.core.fold import PurgeApplied, fold
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position, tombstone_stamp, write_stamp
from tidebook.core.replication_plan import (
    ClearEvents,
    ClearJournal,
    ForgetSegments,
    PositionedAction,
    PutEvents,
    PutHead,
    PutSegments,
    Write,
    plan_key,
)
from tidebook.core.topic_config import TopicConfig

BEFORE_ALL = Position(1, -1)


# ---- planners: which writes, in which order


def no_guard(key: Key, head: Head | None, records: Sequence[PositionedAction], config: TopicConfig) -> Sequence[Write]:
    """Records at or below the head's position are folded again."""
    if head is not None:
        head = msgspec.structs.replace(head, position=BEFORE_ALL)
    return plan_key(key, head, records, config)


def no_redo(key: Key, head: Head | None, records: Sequence[PositionedAction], config: TopicConfig) -> Sequence[Write]:
    """Writes that a crashed replicator may have left undone are not repeated."""
    return plan_key(key, head, [each for each in records if head is None or each.position > head.position], config)


def redo_without_the_head(
    key: Key, head: Head | None, records: Sequence[PositionedAction], config: TopicConfig
) -> Sequence[Write]:
    """Tombstones are repeated, but the head, which only one read may have seen, is not."""
    return [
        write
        for write in plan_key(key, head, records, config)
        if not (isinstance(write, PutHead) and write.head == head)
    ]


def head_before_rows(
    key: Key, head: Head | None, records: Sequence[PositionedAction], config: TopicConfig
) -> Sequence[Write]:
    """The head counts events that are not stored yet."""
    writes = list(plan_key(key, head, records, config))
    for i, (one, next_) in enumerate(pairwise(writes)):
        if isinstance(one, PutEvents) and isinstance(next_, PutHead):
            writes[i], writes[i + 1] = next_, one
    return writes


def tombstones_before_head(
    key: Key, head: Head | None, records: Sequence[PositionedAction], config: TopicConfig
) -> Sequence[Write]:
    """Events are cleared before the head is written that deletes them."""
    writes = list(plan_key(key, head, records, config))
    for i, (one, next_) in enumerate(pairwise(writes)):
        if isinstance(one, PutHead) and isinstance(next_, ClearEvents | ClearJournal):
            writes[i], writes[i + 1] = next_, one
    return writes


def coalesced_purge(
    key: Key, head: Head | None, records: Sequence[PositionedAction], config: TopicConfig
) -> Sequence[Write]:
    """A purge and the next incarnation are one batch: new rows, their head, then the tombstones of the old one."""
    writes = list(plan_key(key, head, records, config))
    if not (writes and isinstance(writes[-1], PutHead) and writes[-1].head.live):
        return writes
    clears = [write for write in writes if isinstance(write, ClearJournal)]
    graves = [write for write in writes if isinstance(write, PutHead) and not write.head.live]
    return [write for write in writes if write not in clears and write not in graves] + clears


def nothing_for_the_short_lived(
    key: Key, head: Head | None, records: Sequence[PositionedAction], config: TopicConfig
) -> Sequence[Write]:
    """Nothing is written for a journal that a slice creates and purges."""
    now = head
    for placed in records:
        if now is None or placed.position > now.position:
            now, change = fold(now, placed.action, placed.position, placed.timestamp_ms, config)
            if isinstance(change, PurgeApplied) and head is None and placed is records[-1]:
                return ()
    return plan_key(key, head, records, config)


def raw_delete_bound(
    key: Key, head: Head | None, records: Sequence[PositionedAction], config: TopicConfig
) -> Sequence[Write]:
    """A delete's tombstone ends at the requested number, not at the last existing one."""
    raw = max((each.action.to for each in records if isinstance(each.action, Delete)), default=0)
    return [
        ClearEvents(key, msgspec.structs.replace(write.head, delete_to=max(raw, write.head.delete_to)), 0)
        if isinstance(write, ClearEvents)
        else write
        for write in plan_key(key, head, records, config)
    ]


def clears_from_the_old_bound(
    key: Key, head: Head | None, records: Sequence[PositionedAction], config: TopicConfig
) -> Sequence[Write]:
    """A repeated delete clears only numbers above those that the head records as deleted."""
    return [
        ClearEvents(key, write.head, head.delete_to)
        if isinstance(write, ClearEvents) and head is not None and head.live
        else write
        for write in plan_key(key, head, records, config)
    ]


def unlisted(key: Key, head: Head | None, records: Sequence[PositionedAction], config: TopicConfig) -> Sequence[Write]:
    """Segments before a jump are not listed."""
    return [write for write in plan_key(key, head, records, config) if not isinstance(write, PutSegments)]


def listed_after_the_head(
    key: Key, head: Head | None, records: Sequence[PositionedAction], config: TopicConfig
) -> Sequence[Write]:
    """The head no longer names segments that are not listed yet."""
    writes = list(plan_key(key, head, records, config))
    for i in reversed(range(len(writes))):
        if isinstance(writes[i], PutSegments):
            after = next(j for j in range(i, len(writes)) if isinstance(writes[j], PutHead))
            writes.insert(after, writes.pop(i))
    return writes


def forgotten_before_cleared(
    key: Key, head: Head | None, records: Sequence[PositionedAction], config: TopicConfig
) -> Sequence[Write]:
    """Segments are unlisted before their rows are cleared."""
    writes = list(plan_key(key, head, records, config))
    for i, write in enumerate(writes):
        if isinstance(write, ForgetSegments):
            writes[i - 1], writes[i] = write, writes[i - 1]
    return writes


def never_forgotten(
    key: Key, head: Head | None, records: Sequence[PositionedAction], config: TopicConfig
) -> Sequence[Write]:
    """Segments of an incarnation that is over stay listed."""
    return [write for write in plan_key(key, head, records, config) if not isinstance(write, ForgetSegments)]


# ---- expanders: which stamps, in which stages


def all_at_once(
    writes: Sequence[Write], interned: Interned, records: Sequence[PositionedAction], listed: Listed
) -> Stages:
    """Each write is sent without waiting for the ones before it."""
    singles = tuple(dict.fromkeys(single for stage in in_stages(writes, interned, records, listed) for single in stage))
    return (singles,) if singles else ()


def stamped_by_batch(
    writes: Sequence[Write], interned: Interned, records: Sequence[PositionedAction], listed: Listed
) -> Stages:
    """Every write of a slice is stamped with the slice's last offset."""
    last = write_stamp(records[-1].position) if records else 0

    def stamped(single: Single) -> Single:
        if isinstance(single, Tombstone | HeadTombstone | ListTombstone):
            return single._replace(stamp=max(last - 1, single.stamp))
        return single._replace(stamp=max(last, single.stamp))

    return tuple(tuple(map(stamped, stage)) for stage in in_stages(writes, interned, records, listed))


def cleared_without_the_list(
    writes: Sequence[Write], interned: Interned, _: Sequence[PositionedAction], listed: Listed
) -> Stages:
    """A clear removes only segments that the head itself names."""
    stages = (tuple(dict.fromkeys(singles_of(write, interned, frozenset()))) for write in writes)
    return tuple(stage for stage in stages if stage)


def without_graves(
    writes: Sequence[Write], interned: Interned, _: Sequence[PositionedAction], listed: Listed
) -> Stages:
    """A purge deletes the head row."""
    stages: list[tuple[Single, ...]] = []
    for write in writes:
        if isinstance(write, PutHead) and not write.head.live:
            stages.append((HeadTombstone(tombstone_stamp(write.head.position)),))
        elif singles := tuple(singles_of(write, interned, listed)):
            stages.append(singles)
    return tuple(stages)
