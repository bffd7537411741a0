"""Claim watermarks: what two snapshots prove."""

from __future__ import annotations

from tidebook.queue.postgres.claim_watermarks import WatermarkReading, watermarks_of

EARLIER = WatermarkReading(began_ms=1_000, ended=50, begun=60, firsts={100: 200})


def test_nothing_waits_before_the_first_date_of_the_later_snapshot() -> None:
    later = WatermarkReading(began_ms=2_000, ended=60, begun=70, firsts={100: 700})
    assert watermarks_of(EARLIER, later, ()) == {100: 700}


def test_an_entry_that_is_not_visible_yet_has_a_date_after_the_earlier_snapshot() -> None:
    later = WatermarkReading(began_ms=2_000, ended=60, begun=70, firsts={100: 1_900})
    assert watermarks_of(EARLIER, later, ()) == {100: 1_000}


def test_a_priority_that_was_drained_has_a_watermark_too() -> None:
    later = WatermarkReading(began_ms=2_000, ended=65, begun=70, firsts={100: 700})
    assert watermarks_of(EARLIER, later, {20, 100}) == {20: 1_000, 100: 700}


def test_nothing_is_proven_while_a_transaction_from_before_the_earlier_snapshot_is_open() -> None:
    later = WatermarkReading(began_ms=2_000, ended=59, begun=70, firsts={100: 700})
    assert watermarks_of(EARLIER, later, ()) is None


def test_transaction_ids_of_another_server_prove_nothing() -> None:
    later = WatermarkReading(began_ms=2_000, ended=7, begun=8, firsts={100: 700})
    assert watermarks_of(EARLIER, later, ()) is None
