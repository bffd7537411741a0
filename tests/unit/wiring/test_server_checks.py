"""How `tidebook doctor` judges clocks, replicas and retention, without a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidebook.wiring.server_checks import check_clock, check_replicas, check_retention, check_servers
from tidebook.wiring.settings import read_settings

HOUR_MS = 3_600_000


@pytest.mark.parametrize(("theirs_s", "ok"), [(99.0, True), (101.0, True), (97.0, False), (104.5, False)])
def test_a_clock_may_differ_by_two_seconds_from_the_time_of_the_request(theirs_s: float, ok: bool) -> None:
    found = check_clock("clock", theirs_s, began_s=100.0, ended_s=101.0)
    assert found.ok is ok
    assert ("NTP" in found.detail) is not ok


def test_a_slow_answer_is_not_clock_skew() -> None:
    assert check_clock("clock", 105.0, began_s=100.0, ended_s=110.0).ok


def test_retention_is_compared_with_the_oldest_unreplicated_record() -> None:
    assert check_retention("topic t", -1, 999 * HOUR_MS).ok
    assert check_retention("topic t", 24 * HOUR_MS, None).ok
    assert check_retention("topic t", 24 * HOUR_MS, 11 * HOUR_MS).ok
    late = check_retention("topic t", 24 * HOUR_MS, 13 * HOUR_MS)
    assert late.ok is False
    assert late.detail == (
        "the oldest unreplicated record has waited 13 h of 24 h, after which it is lost: run 'tidebook pipeline "
        "replicate' now, or raise retention.ms with kafka-configs"
    )


def test_replicas_are_compared_with_the_nodes() -> None:
    simple = "org.apache.cassandra.locator.SimpleStrategy"
    assert check_replicas("k", {"class": simple, "replication_factor": "1"}, nodes=1).ok
    assert check_replicas("k", {"class": simple, "replication_factor": "3"}, nodes=3).ok
    assert check_replicas("k", {"class": simple, "replication_factor": "1"}, nodes=3).ok is None
    assert check_replicas("k", {"class": simple, "replication_factor": "3"}, nodes=2).ok is False


async def test_a_server_that_does_not_answer_is_a_finding_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidebook.postgres.connect.OPEN_S_MAX", 0.1)
    (tmp_path / "tidebook.toml").write_text('[sql]\nurl = "postgresql://ada@127.0.0.1:1/shop"\n')
    [found] = [each async for each in check_servers(read_settings(tmp_path / "tidebook.toml"))]
    assert (found.check, found.ok) == ("sql", False)
    assert found.detail.endswith("check that the server runs, and url, user and password in [sql]")
