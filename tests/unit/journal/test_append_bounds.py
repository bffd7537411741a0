"""Appends at their bounds: sizes of records, ids, retries, and and what is known about an unconfirmed one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest

from tests.unit.journal.rig import TOPIC, Rig
from tidebook.core.errors import Corrupt, InvalidInput, OutcomeUnknown, TooLarge
from tidebook.core.event import Event
from tidebook.core.position import Position
from tidebook.core.record import PLAIN_BYTES_MAX, decode_record
from tidebook.core.topic_config import TopicConfig
from tidebook.journal.append import EncodedAppends, PendingBatch, encode_append, retry_floor
from tidebook.journal.outcome import Appended
from tidebook.log.port import AcknowledgedBatch, RecordColumns
from tidebook.runtime.clock import RandomIds

OpenRig = Callable[..., Rig]
LIMIT_BYTES = 400
CONFIG = TopicConfig(topic_id="id", partitions=1, limit_bytes=LIMIT_BYTES)


def encoded_alone(events: list[Event]) -> bytes:
    return encode_append(CONFIG, RandomIds(), events)[1]


def encoded_with_others(events: list[Event]) -> bytes:
    return EncodedAppends([[Event(1)], events, [Event(2)]], CONFIG, RandomIds()).values(slice(0, 3))[1]


def encoded_with_an_id(events: list[Event]) -> bytes:
    return encode_append(CONFIG, RandomIds(), events, append_id=b"x" * 16)[1]


@pytest.mark.parametrize("encode", [encoded_alone, encoded_with_others])
def test_a_record_is_never_above_the_limit_and_a_plain_one_is_refused_like_any_other(
    encode: Callable[[list[Event]], bytes],
) -> None:
    fit = 0
    for size in range(LIMIT_BYTES - PLAIN_BYTES_MAX - 3, LIMIT_BYTES + PLAIN_BYTES_MAX + 3):
        events = [Event(b"x" * size)]
        try:
            encoded_with_an_id(events)
        except TooLarge:
            with pytest.raises(TooLarge):
                encode(events)
            continue
        value = encode(events)
        fit += 1
        assert len(value) <= LIMIT_BYTES
        assert decode_record(value).count == 1  # type: ignore[union-attr]
    assert 0 < fit < 2 * PLAIN_BYTES_MAX


@pytest.mark.parametrize("payload", [b"", "", None, b"x"])
def test_an_empty_payload_is_an_event_like_any_other(payload: Any) -> None:
    for encode in (encoded_alone, encoded_with_others, encoded_with_an_id):
        action: Any = decode_record(encode([Event(payload)]))
        again: Any = decode_record(encoded_with_an_id([Event(payload)]))
        assert (action.count, action.body) == (1, again.body)


@pytest.mark.parametrize("append_id", [bytes(15), bytes(17), bytearray(16), "x" * 16])
def test_an_append_id_is_16_bytes(append_id: Any) -> None:
    with pytest.raises(InvalidInput, match="16 bytes"):
        encode_append(CONFIG, RandomIds(), [Event(1)], append_id=append_id)
    action, _ = encode_append(CONFIG, RandomIds(), [Event(1)], append_id=bytes(16))
    assert action is not None
    assert action.append_id == bytes(16)


def test_a_retry_needs_the_id_of_its_append_and_takes_no_other() -> None:
    unknown = OutcomeUnknown("no answer", append_id=b"a" * 16, partition=0, offset=None, floor=7, epoch=CONFIG.epoch)
    action, _ = encode_append(CONFIG, RandomIds(), [Event(1)], retry=unknown)
    assert action is not None
    assert (action.append_id, action.floor) == (b"a" * 16, 7)
    with pytest.raises(InvalidInput, match="excludes append_id"):
        encode_append(CONFIG, RandomIds(), [Event(1)], retry=unknown, append_id=b"a" * 16)
    with pytest.raises(InvalidInput, match="of an append"):
        encode_append(CONFIG, RandomIds(), [Event(1)], retry=OutcomeUnknown("a purge's"))
    assert retry_floor(unknown, CONFIG.epoch + 1) == -1
    assert retry_floor(OutcomeUnknown("no floor", append_id=b"a" * 16, epoch=CONFIG.epoch), CONFIG.epoch) == -1


@pytest.mark.parametrize("many", [False, True])
async def test_an_unconfirmed_append_has_its_numbers_if_a_tail_knows_the_head(rig: Rig, many: bool) -> None:
    """The tail begins at the very start of the log here."""
    await rig.make_topic()
    assert await rig.journal.create()
    assert rig.journal._open is not None
    cache = rig.journal._open.partitions[0].cache
    await cache.head("a")
    first = cache.next_offset
    await cache.reach(await rig.log.end(TOPIC, 0) - 1)
    if many:
        [appended] = await rig.journal.append_many([("a", [Event(1), Event(2)])], confirm=False)
        assert isinstance(appended, Appended)
    else:
        appended = await rig.append("a", 1, 2, confirm=False)
    assert (appended.first, appended.last) == (1, 2)
    assert first == 0
    assert cache.pending_outcomes == {}


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("confirm", [False, True])
async def test_an_append_that_the_tail_met_before_its_acknowledgement_has_its_numbers(
    open_rig: OpenRig, many: bool, confirm: bool
) -> None:
    rig = open_rig(follow_s=0)
    await rig.make_topic()
    await rig.journal.create()
    assert rig.journal._open is not None
    cache = rig.journal._open.partitions[0].cache
    await cache.head("a")
    held = rig.log_faults.hold("send", after=True)
    if many:
        appending: asyncio.Task[Any] = asyncio.create_task(
            rig.journal.append_many([("a", [Event(1)])], confirm=confirm)
        )
    else:
        appending = asyncio.create_task(rig.append("a", 1, confirm=confirm))
    await held.reached()
    await cache.reach(await rig.log.end(TOPIC, 0) - 1, follow=False)
    rig.store_faults.calls.clear()
    rig.log_faults.calls.clear()
    held.release()
    done = await appending
    appended = done[0] if many else done
    assert (appended.first, appended.last) == (1, 1)
    assert cache.pending_outcomes == {}
    assert not rig.store_faults.calls
    assert not rig.log_faults.calls


@pytest.mark.parametrize("many", [False, True])
async def test_without_a_tail_an_unconfirmed_append_has_its_offset_alone(rig: Rig, many: bool) -> None:
    await rig.journal.create()
    assert rig.journal._open is not None
    cache = rig.journal._open.partitions[0].cache
    first = rig.first_offset
    if many:
        outcomes = await rig.journal.append_many([("a", [Event(1)]), ("b", [Event(1)])], confirm=False)
    else:
        outcomes = [await rig.append(id, 1, confirm=False) for id in "ab"]
    found = [(each.first, each.last, each.offset) for each in outcomes if isinstance(each, Appended)]
    assert found == [(None, None, first), (None, None, first + 1)]
    assert (cache.seen, cache.next_offset) == (first + 1, -1)
    assert cache.pending_outcomes == {}


@pytest.mark.parametrize("how", [{}, {"append_id": bytes(16)}, {"expected": 3}])
def test_an_append_without_events_is_refused(how: dict[str, Any]) -> None:
    none: tuple[Sequence[Event], ...] = ([], ())
    for events in none:
        with pytest.raises(InvalidInput, match="at least one event"):
            encode_append(CONFIG, RandomIds(), events, **how)


@pytest.mark.parametrize(
    ("how", "text"), [({"expected": -1}, "^expected"), ({"at": 0}, "^at"), ({"expected": 1, "at": 2}, "not both")]
)
def test_an_impossible_number_is_refused_by_its_name(how: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        encode_append(CONFIG, RandomIds(), [Event(1)], **how)
    action, _ = encode_append(CONFIG, RandomIds(), [Event(1)], expected=0)
    assert action is not None
    assert action.expected == 0


@pytest.mark.parametrize(
    "how",
    [{}, {"expected": 3}, {"at": 3}, {"expire_after": timedelta(milliseconds=7)}, {"append_id": b"a" * 16},
     {"expected": 3, "incarnation": Position(1, 5)}],
    ids=lambda how: "+".join(how),
)  # fmt: skip
def test_every_condition_of_an_append_is_in_its_record(how: dict[str, Any]) -> None:
    action: Any = decode_record(encode_append(CONFIG, RandomIds(), [Event(1)], **how)[1])
    assert (action.expected, action.at, action.incarnation) == tuple(
        how.get(name) for name in ("expected", "at", "incarnation")
    )
    assert action.expire_after_ms == (7 if "expire_after" in how else None)
    assert (action.append_id == b"a" * 16) is ("append_id" in how)


class BatchLog:
    """A log that acknowledges batches when the test calls them."""

    def send_many(self, columns: RecordColumns, batch: PendingBatch) -> None:
        """Wait for the test."""


@pytest.mark.parametrize(("offset", "is_new"), [(1, True), (0, False), (-1, False)])
async def test_the_next_offset_after_those_seen_is_that_of_a_new_record_and_no_lower_one_is(
    rig: Rig, offset: int, is_new: bool
) -> None:
    """Acknowledgements of a batch, as a log like Kafka's reports them: an offset that was seen proves another log."""
    await rig.append("a", 1, confirm=False)
    assert rig.journal._open is not None
    cache = rig.journal._open.partitions[0].cache
    seen = cache.seen
    columns = RecordColumns(TOPIC, [0, 0], [b"a", b"b"], [encoded_alone([Event(n)]) for n in range(2)])
    batch = PendingBatch(["a", "b"], {0: cache}, columns, confirm=False)
    batch.send(BatchLog())  # type: ignore[arg-type]
    batch([0, 1], AcknowledgedBatch(0, [seen + offset, seen + offset + 1], [1, 1]))
    outcomes = await batch.outcomes()
    assert [type(each) for each in outcomes] == [Appended if is_new else Corrupt] * 2
    if is_new:
        cache.check_log()
        assert cache.seen == seen + 2
    else:
        with pytest.raises(Corrupt, match="was deleted and created again"):
            cache.check_log()


async def test_the_floor_of_an_append_of_many_is_above_every_offset_that_was_seen(rig: Rig) -> None:
    await rig.append("a", 1, confirm=False)
    assert rig.journal._open is not None
    cache = rig.journal._open.partitions[0].cache
    columns = RecordColumns(TOPIC, [0], [b"a"], [encoded_alone([Event(1)])])
    batch = PendingBatch(["a"], {0: cache}, columns, confirm=False)
    batch.send(BatchLog())  # type: ignore[arg-type]
    batch([0], [OutcomeUnknown("no answer")])
    [unknown] = await batch.outcomes()
    assert isinstance(unknown, OutcomeUnknown)
    assert unknown.floor == cache.seen + 1
