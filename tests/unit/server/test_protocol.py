"""How long a client has been stuck: it accepts none of the bytes that are waiting for it."""

from __future__ import annotations

from tidebook.server.protocol import UnsentBytes


def test_a_client_that_accepts_a_part_is_not_stuck() -> None:
    unsent = UnsentBytes()
    assert [unsent.stuck_s(*seen) for seen in [(1.0, 900), (5.0, 900), (9.0, 800), (20.0, 700)]] == [0.0, 4.0, 0.0, 0.0]


def test_a_client_that_accepts_nothing_is_stuck_until_nothing_is_left() -> None:
    unsent = UnsentBytes()
    assert [unsent.stuck_s(now_s, 5) for now_s in (1.0, 2.0, 40.0)] == [0.0, 1.0, 39.0]
    assert unsent.stuck_s(41.0, 0) == 0.0
    assert unsent.stuck_s(90.0, 0) == 0.0
    assert unsent.stuck_s(91.0, 5) == 0.0


def test_more_waiting_bytes_restart_the_time() -> None:
    unsent = UnsentBytes()
    assert [unsent.stuck_s(now_s, count) for now_s, count in [(1.0, 5), (9.0, 6), (10.0, 6)]] == [0.0, 0.0, 1.0]
