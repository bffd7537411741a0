"""The search for ends of a log that cover everything which a leader has appended, replicated or not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidebook.outbox.kafka.replicated_ends import EndSearch, ReportedEnd, newest_ends


def ends(offset: int, epoch: int) -> dict[int, ReportedEnd]:
    return {0: ReportedEnd(offset, epoch)}


@pytest.mark.parametrize(
    ("answers", "brokers", "expected"),
    [
        ([ends(5, 1)], 1, 5),
        ([ends(5, 1)], 2, None),
        ([ends(5, 1)], 3, None),
        ([ends(9, 1), ends(5, 2)], 3, 5),
        ([ends(5, 2), ends(9, 1)], 3, 5),
        ([ends(5, 1), ends(9, 1)], 4, None),
        ([ends(3, 1), ends(3, 1), ends(4, 2)], 5, 4),
        ([], 3, None),
        ([], 0, None),
    ],
)
def test_the_newest_leader_among_the_answers_of_most_brokers_decides(
    answers: list[dict[int, ReportedEnd]], brokers: int, expected: int | None
) -> None:
    found = newest_ends(answers, brokers)
    assert (found and found[0].offset) == expected


def test_each_partition_has_its_own_newest_leader() -> None:
    one = {0: ReportedEnd(5, 1), 1: ReportedEnd(7, 4)}
    two = {0: ReportedEnd(6, 2), 1: ReportedEnd(8, 3)}
    assert newest_ends([one, two], 3) == {0: two[0], 1: one[1]}


def test_an_end_that_no_leader_confirms_is_not_replicated() -> None:
    search = EndSearch()
    for _ in range(5):
        search.note_ends({0: 3, 1: 3})
        search.note_refusals(search.offsets(), {1})
        assert search.replicated == {1: 3}


def test_one_refusal_proves_that_an_idle_log_is_replicated() -> None:
    search = EndSearch()
    search.note_ends({0: 7})
    assert search.offsets() == {0: 8}
    search.note_refusals({0: 8}, {0})
    assert search.replicated == {0: 7}
    assert search.offsets() == {}


#: Records appended, records replicated, and whether the answer to a request is lost, in each round.
ROUNDS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.booleans()), max_size=30)


@given(st.integers(0, 5), st.integers(0, 20), ROUNDS)
def test_a_replicated_end_covers_what_was_appended_before_the_search(
    visible: int, unreplicated: int, rounds: list[tuple[int, int, bool]]
) -> None:
    log_end = first_log_end = visible + unreplicated
    search = EndSearch()
    for appended, replicated, is_lost in rounds:
        search.note_ends({0: visible})
        log_end += appended
        offsets = search.offsets()
        refused = {p for p, offset in offsets.items() if offset > log_end and not is_lost}
        search.note_refusals(offsets, refused)
        for end in search.replicated.values():
            assert first_log_end <= end <= visible
        visible = max(visible, min(log_end, visible + replicated))
        if search.replicated:
            return


@given(st.integers(0, 5), st.integers(0, 200), st.integers(1, 50))
def test_a_replicated_end_of_a_log_that_is_written_to_is_found(visible: int, behind: int, speed: int) -> None:
    """The high watermark follows the log's end at a constant distance, so that they are never equal."""
    search = EndSearch()
    for _ in range(8 + 8 * behind // speed):
        search.note_ends({0: visible})
        offsets = search.offsets()
        search.note_refusals(offsets, {p for p, offset in offsets.items() if offset > visible + behind})
        visible += speed
    assert search.replicated
