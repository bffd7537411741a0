"""Any content of a valid frame is either an action that can be folded and replicated, or damaged."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.core.nonsense import rests, sealed
from tidebook.core.action import Append, Damaged
from tidebook.core.errors import UnknownVersion
from tidebook.core.event import decode_events, unpack_events
from tidebook.core.head import Head, decode_head, encode_head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.record import MAGIC, VERSION, encode_record, read_record
from tidebook.core.replication_plan import PositionedAction, TagRow, advance_time, plan_key
from tidebook.core.topic_config import TopicConfig

CONFIG = TopicConfig(topic_id="t", partitions=1, segment_size=5)
LIMIT = 1_000_000
FIRST_MS = 1_700_000_000_000


@settings(deadline=None)
@given(rests, st.sampled_from([VERSION, VERSION, VERSION, 0, VERSION + 1]))
def test_any_frame_is_an_action_or_damaged_or_of_another_version(rest: bytes, version: int) -> None:
    try:
        action = read_record(sealed(MAGIC, version, rest), limit_bytes=LIMIT)
    except UnknownVersion:
        assert version != VERSION
        return
    assert version == VERSION
    if not isinstance(action, Damaged):
        again = encode_record(action, limit_bytes=LIMIT)  # a readable record can be encoded again
        assert read_record(again, limit_bytes=LIMIT) == action
    if isinstance(action, Append):
        assert len(decode_events(unpack_events(action.body))) == action.count


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_damaged_or_of_another_version(value: bytes) -> None:
    assert isinstance(read_record(value, limit_bytes=LIMIT), Damaged)


@settings(deadline=None)
@given(st.lists(rests, max_size=8), st.integers(0, 8), st.booleans())
def test_every_readable_record_can_be_folded_and_replicated(batch: list[bytes], cut: int, clear_tags: bool) -> None:
    placed: list[PositionedAction] = []
    time_ms = 0
    for offset, rest in enumerate(batch):
        timestamp_ms = FIRST_MS + offset
        action = read_record(sealed(MAGIC, VERSION, rest), limit_bytes=LIMIT)
        time_ms = advance_time(time_ms, timestamp_ms, action)
        placed.append(PositionedAction(Position(1, offset), timestamp_ms, action, time_ms))
    assert time_ms < FIRST_MS + 2 * 86_400_000
    head = _head_after(None, placed[:cut], clear_tags)
    head = _head_after(head, placed[cut // 2 :], clear_tags)  # some of the records a second time
    assert head == _head_after(None, placed, clear_tags)


def _head_after(head: Head | None, placed: list[PositionedAction], clear_tags: bool) -> Head | None:
    for write in plan_key(Key("t", "a"), head, placed, CONFIG, clear_tags=clear_tags):
        head = write.head
        assert decode_head(encode_head(head)) == head
        for row in getattr(write, "rows", ()):
            if isinstance(row, TagRow):
                assert not head.live or 1 <= row.tag_seq_nr <= head.tag_counts[row.tag]
    return head
