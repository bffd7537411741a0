"""From where on a claim need look: what two snapshots prove."""

from __future__ import annotations

from tidebook.sql.postgres.queue_floors import Reading, floors_of

EARLIER = Reading(began_ms=1_000, ended=50, begun=60, firsts={100: 200})


def test_nothing_waits_below_the_first_that_the_later_snapshot_shows() -> None:
    later = Reading(began_ms=2_000, ended=60, begun=70, firsts={100: 700})
    assert floors_of(EARLIER, later, ()) == {100: 700}


def test_what_is_not_seen_yet_has_a_date_after_the_earlier_snapshot() -> None:
    later = Reading(began_ms=2_000, ended=60, begun=70, firsts={100: 1_900})
    assert floors_of(EARLIER, later, ()) == {100: 1_000}


def test_a_priority_that_was_drained_has_a_floor_too() -> None:
    later = Reading(began_ms=2_000, ended=65, begun=70, firsts={100: 700})
    assert floors_of(EARLIER, later, {20, 100}) == {20: 1_000, 100: 700}


def test_nothing_is_proven_while_a_transaction_of_before_the_earlier_snapshot_is_open() -> None:
    later = Reading(began_ms=2_000, ended=59, begun=70, firsts={100: 700})
    assert floors_of(EARLIER, later, ()) is None


def test_numbers_of_another_server_prove_nothing() -> None:
    later = Reading(began_ms=2_000, ended=7, begun=8, firsts={100: 700})
    assert floors_of(EARLIER, later, ()) is None
