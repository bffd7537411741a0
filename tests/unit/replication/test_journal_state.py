"""A journal folded from its log, and its differences from a damaged store."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidebook.core.action import Action
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.record import read_record
from tidebook.core.replication_plan import Pointer, PositionedAction
from tidebook.replication.journal_state import JournalState, differences, fold_journal, repair_of
from tidebook.testing.conformance.journal_records import Step, append, delete, purge, records_of, topic_config, truth_of

CONFIG = topic_config()
KEY = Key("t", "a")

ACTIONS = st.one_of(
    st.builds(append, st.integers(1, 3)),
    st.builds(lambda n: append(1, expected=n), st.integers(0, 6)),
    st.builds(lambda n: append(1, at=n), st.integers(1, 12)),
    st.builds(delete, st.integers(1, 8)),
    st.just(purge()),
)


def placed(actions: list[Action]) -> list[PositionedAction]:
    steps: list[Step] = [("a", action) for action in actions]
    return [
        PositionedAction(
            Position(CONFIG.epoch, record.offset),
            record.timestamp_ms,
            read_record(record.value, limit_bytes=10**6),
            record.timestamp_ms,
        )
        for record in records_of(steps)
    ]


def store_of(actions: list[Action]) -> JournalState:
    truth = truth_of([("a", action) for action in actions], CONFIG).get("a")
    return JournalState() if truth is None else JournalState(truth.head, {row.seq_nr: row for row in truth.rows})


@given(st.lists(ACTIONS, max_size=12))
def test_a_store_that_holds_what_the_fold_says_does_not_differ(actions: list[Action]) -> None:
    found = store_of(actions)
    folded = fold_journal(KEY, 0, found, placed(actions), CONFIG, Position(CONFIG.epoch, 0))
    assert differences(folded, found) == []


@given(st.lists(ACTIONS, min_size=1, max_size=12), st.data())
def test_without_the_first_records_what_the_store_says_of_them_is_taken(
    actions: list[Action], data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(actions)))
    found = store_of(actions)
    folded = fold_journal(KEY, 0, found, placed(actions)[start:], CONFIG, Position(CONFIG.epoch, start))
    assert differences(folded, found) == []


@settings(max_examples=60)
@given(st.lists(ACTIONS, min_size=1, max_size=10), st.data())
def test_a_mend_puts_right_whatever_was_damaged(actions: list[Action], data: st.DataObject) -> None:
    truth = store_of(actions)
    rows = dict(truth.rows)
    for seq_nr in data.draw(st.lists(st.integers(1, 15), max_size=4)):
        row = rows.pop(seq_nr, None)
        if row is None and truth.rows:
            some = next(iter(truth.rows.values()))
            rows[seq_nr] = msgspec.structs.replace(some, seq_nr=seq_nr, encoded=b"extra")
    head = truth.head
    if head is not None and data.draw(st.booleans()):
        head = msgspec.structs.replace(head, seq_nr=head.seq_nr + 1)
    found = JournalState(head, rows)
    records = placed(actions)
    pointer = Pointer(records[-1].position, 0)
    folded = fold_journal(KEY, 0, found, records, CONFIG, Position(CONFIG.epoch, 0))
    repair = repair_of(folded, found, pointer, CONFIG, 1)
    repaired = {n: row for n, row in rows.items() if n not in repair.extra_rows} | {
        row.seq_nr: row for row in repair.rows
    }
    after = JournalState(repair.head, repaired)
    assert differences(fold_journal(KEY, 0, after, records, CONFIG, Position(CONFIG.epoch, 0)), after) == []


@pytest.mark.parametrize("what", ["head extra", "event extra"])
def test_a_journal_that_the_log_knows_nothing_of_is_extra(what: str) -> None:
    found = store_of([append(2)])
    folded = fold_journal(KEY, 0, found, [], CONFIG, Position(CONFIG.epoch, 0))
    assert what in {each.what for each in differences(folded, found)}
