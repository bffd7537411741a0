"""The selection of a batch, packed ids, and conditions that select rows by id, as properties over generated rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidebook.core.errors import Corrupt, InvalidInput
from tidebook.outbox import batch_selection as plan
from tidebook.outbox.fence import Fence
from tidebook.outbox.message import order_key, pack_headers, unpack_headers
from tidebook.outbox.port import ID_HEADER, SESSION_HEADER, ParkedState, TargetTopic, WaitingMessage
from tidebook.outbox.settings import OutboxSettings
from tidebook.outbox.sql import id_condition, pack_ids, runs, unpack_ids

LIMIT = 1_000
TOPIC = TargetTopic("orders", "uuid", 3, LIMIT, False, Fence.TIMESTAMP, 20_000)

ids = st.lists(st.integers(1, 2**62), unique=True, max_size=200).map(sorted)
keys = st.sampled_from([None, b"a", b"b", b"c"])
rows = st.lists(
    st.builds(
        WaitingMessage,
        id=st.integers(1, 10**6),
        key=keys,
        partition_key=keys,
        payload=st.sampled_from([None, b"", b"x", b"x" * 2000]),
        headers=st.sampled_from([None, pack_headers((("a", b"b"),))]),
        tries=st.integers(0, 3),
    ),
    max_size=30,
    unique_by=lambda row: row.id,
).map(lambda found: sorted(found, key=lambda row: row.id))
held_keys = st.frozensets(st.sampled_from([b"a", b"b"]))
settings_ = st.builds(OutboxSettings, parked=st.sampled_from(["hold_key", "skip"]), park_after_tries=st.integers(1, 4))


@given(ids)
def test_packed_ids_round_trip(given_ids: list[int]) -> None:
    assert unpack_ids(pack_ids(given_ids)) == tuple(given_ids)


def test_consecutive_ids_take_few_bytes() -> None:
    assert len(pack_ids(range(1_000_000, 1_001_000))) <= 10


@pytest.mark.parametrize("packed", [b"\x80", b"\x01", b"\x01\x80"])
def test_damaged_ids_are_corrupt(packed: bytes) -> None:
    with pytest.raises(Corrupt):
        unpack_ids(packed)


@given(st.lists(st.integers(1, 60), unique=True, min_size=1).map(sorted))
def test_a_condition_selects_exactly_its_ids(given_ids: list[int]) -> None:
    named = set()
    for first, last in runs(given_ids):
        named |= set(range(first, last + 1))
    assert named == set(given_ids)
    condition, parameters = id_condition(given_ids)
    assert condition.count("BETWEEN") in {0, len(runs(given_ids))}
    assert condition.count("%s") == len(parameters)


@given(rows, held_keys, settings_)
def test_no_message_overtakes_an_earlier_one_with_its_key(
    waiting: list[WaitingMessage], held: frozenset[bytes], settings: OutboxSettings
) -> None:
    chosen = plan.select_batch(waiting, held, TOPIC, settings)
    sent = {row.id for row in chosen.send}
    aside = {each.id: each for each in chosen.park}
    assert sent | set(aside) == {row.id for row in waiting}
    assert not sent & set(aside)
    assert [row.id for row in chosen.send] == sorted(sent)
    blocked = set(held)
    for row in waiting:
        key = order_key(row)
        if row.id in sent:
            assert key is None or key not in blocked
            assert plan.size_bytes(row) <= LIMIT
        elif aside[row.id].state is ParkedState.HELD:
            assert key in blocked
        else:
            assert plan.size_bytes(row) > LIMIT
            parked = aside[row.id].state is ParkedState.PARKED
            assert parked == (row.tries + 1 >= settings.park_after_tries)
            if key is not None and (not parked or settings.parked == "hold_key"):
                blocked.add(key)


@given(rows)
def test_a_batch_has_few_appends_of_each_journal_in_order(waiting: list[WaitingMessage]) -> None:
    topic = TargetTopic("journal:orders", "uuid/1", 3, 10**9, False, Fence.APPEND_ID, 0)
    many = [WaitingMessage(n, row.key, None, row.payload, None) for n, row in enumerate(waiting * 12, 1)]
    chosen = plan.select_batch(many, frozenset(), topic, OutboxSettings())
    for key in {row.key for row in many}:
        sent = [row.id for row in chosen.send if row.key == key]
        assert sent == [row.id for row in many if row.key == key][: plan.APPENDS_PER_JOURNAL_MAX]


@given(rows)
def test_a_relayed_message_carries_its_identity_before_its_own_headers(waiting: list[WaitingMessage]) -> None:
    session, outbox = b"s" * 16, b"o" * 16
    for row, made in zip(waiting, plan.to_relayed(waiting, session=session, outbox=outbox), strict=True):
        assert made.headers[0] == (SESSION_HEADER, session + row.id.to_bytes(8, "big"))
        assert made.headers[1] == (ID_HEADER, outbox + row.id.to_bytes(8, "big"))
        assert tuple(made.headers[2:]) == unpack_headers(row.headers)
        assert (made.key, made.partition_key, made.value) == (row.key, row.partition_key, row.payload)


def test_a_message_without_a_key_cannot_go_to_a_compacted_topic() -> None:
    compacted = TargetTopic("orders", "uuid", 3, LIMIT, True, Fence.TIMESTAMP, 20_000)
    chosen = plan.select_batch([WaitingMessage(1, None, b"p", b"x", None)], frozenset(), compacted, OutboxSettings())
    assert chosen.send == ()
    assert chosen.park[0].state is ParkedState.PARKED


@pytest.mark.parametrize(
    "wrong",
    [{"threads": 0}, {"lock_limit_s": -1}, {"lock_limit_s": 10, "fence_s": 6}, {"fence_s": 0}, {"park_after_tries": 0}],
)
def test_invalid_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        OutboxSettings(**wrong)  # type: ignore[arg-type]
