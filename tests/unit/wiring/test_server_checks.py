"""How `tidebook doctor` judges versions, permissions, clocks, replicas and retention, without a server."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tidebook.wiring.server_checks import (
    MysqlFacts,
    PostgresFacts,
    Replicas,
    check_clock,
    check_in_sync,
    check_replicas,
    check_retention,
    check_servers,
    check_spark,
    judge_mysql,
    judge_postgres,
)
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


@pytest.mark.parametrize(
    ("least", "partitions", "detail"),
    [
        (1, [Replicas(0, 1, 1)], None),
        (2, [Replicas(0, 3, 3), Replicas(1, 3, 3)], None),
        (2, [Replicas(0, 1, 1)], "min.insync.replicas is 2 and there are 1 replicas: no append is accepted"),
        (2, [Replicas(0, 3, 3), Replicas(1, 3, 2)], "partition 1 has 2 of 3 replicas in sync: start the brokers"),
        (2, [Replicas(0, 3, 1), Replicas(1, 3, 2)], "accepts no append, because min.insync.replicas is 2, and 1 more"),
    ],
)
def test_replicas_of_a_topic_are_compared_with_those_in_sync(
    least: int, partitions: list[Replicas], detail: str | None
) -> None:
    found = check_in_sync("topic t", least, partitions)
    assert [(each.check, each.ok) for each in found] == ([("topic t replicas", False)] if detail else [])
    assert all(str(detail) in each.detail for each in found)


POSTGRES = PostgresFacts(
    number=160004, version="16.4", now_s=100.0, standby=False, user="ada", schema="public", may_create=True,
    outbox_schema=None, queue_schema="tidebook_queue", has_queues=False, may_use_queues=False, may_create_schema=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "check", "ok", "remedy"),
    [
        ({}, "sql permissions", True, ""),
        ({"number": 130002, "version": "13.2"}, "sql", False, "needs 14 or newer"),
        ({"now_s": 90.0}, "sql clock", False, "NTP"),
        ({"standby": True}, "sql role", False, "name the primary"),
        ({"may_create": False}, "sql permissions", False, "GRANT CREATE ON SCHEMA"),
        (
            {"may_create": False, "outbox_schema": "shop"},
            "sql permissions",
            True,
            "in schema shop",
        ),  # an administrator created the tables
        ({"may_create_schema": False}, "sql queues", None, "GRANT CREATE ON DATABASE"),
        ({"has_queues": True}, "sql queues", False, "GRANT USAGE ON SCHEMA tidebook_queue TO ada"),
    ],
)
def test_postgresql_is_judged_by_what_it_reports(
    changed: dict[str, object], check: str, ok: bool | None, remedy: str
) -> None:
    found = judge_postgres(POSTGRES._replace(**changed), 100.0, 100.1)  # type: ignore[arg-type]
    [named] = [each for each in found if each.check == check]
    assert named.ok is ok
    assert remedy in named.detail
    assert [each.check for each in found if each.ok is not True] == ([] if ok else [check])


MARIADB = MysqlFacts(
    "11.4.5-MariaDB", 100.0, read_only=False, user="ada@%", database="shop", has_outbox=False, may_create=True
)


@pytest.mark.parametrize(
    ("changed", "check", "ok", "remedy"),
    [
        ({}, "sql permissions", True, ""),
        ({"version": "10.5.1-MariaDB-log"}, "sql", False, "needs 10.6 or newer"),
        ({"version": "8.0.36"}, "sql", True, ""),
        ({"version": "5.7.44-log"}, "sql", False, "MySQL 5.7.44-log: Tidebook needs 8.0 or newer"),
        ({"now_s": 110.0}, "sql clock", False, "NTP"),
        ({"read_only": True}, "sql role", False, "name the primary"),
        ({"database": None}, "sql permissions", False, "add /NAME"),
        ({"may_create": False}, "sql permissions", None, "GRANT CREATE ON shop.*"),
        ({"may_create": False, "has_outbox": True}, "sql permissions", True, ""),
    ],
)
def test_mariadb_and_mysql_are_judged_by_what_they_report(
    changed: dict[str, object], check: str, ok: bool | None, remedy: str
) -> None:
    found = judge_mysql(MARIADB._replace(**changed), 100.0, 100.1)  # type: ignore[arg-type]
    [named] = [each for each in found if each.check == check]
    assert named.ok is ok
    assert remedy in named.detail
    assert [each.check for each in found if each.ok is not True] == ([] if ok else [check])


async def test_one_master_of_a_spark_cluster_must_answer() -> None:
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(close, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert (await check_spark(f"spark://127.0.0.1:1,127.0.0.1:{port}")).ok
    gone = await check_spark("spark://127.0.0.1:1")
    assert (gone.check, gone.ok) == ("spark", False)
    assert gone.detail.endswith("check that the master runs, and [pipeline] master")
    assert (await check_spark("spark://[::1")).ok is False


async def test_a_missing_package_is_not_taken_for_a_dead_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pymysql", None)
    monkeypatch.delitem(sys.modules, "tidebook.outbox.mysql", raising=False)
    (tmp_path / "tidebook.toml").write_text('[sql]\nurl = "mysql://ada@127.0.0.1:1/shop"\n')
    [found] = [each async for each in check_servers(read_settings(tmp_path / "tidebook.toml"))]
    assert (found.check, found.ok) == ("sql", False)
    assert found.detail.endswith("pip install 'tidebook[mysql]'")


@pytest.mark.parametrize("scheme", ["postgresql", "mysql"])
async def test_a_server_that_does_not_answer_is_a_finding_with_a_remedy(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidebook.postgres.connect.OPEN_S_MAX", 0.1)
    (tmp_path / "tidebook.toml").write_text(f'[sql]\nurl = "{scheme}://ada@127.0.0.1:1/shop"\n')
    [found] = [each async for each in check_servers(read_settings(tmp_path / "tidebook.toml"))]
    assert (found.check, found.ok) == ("sql", False)
    assert found.detail.endswith("check that the server runs, and url, user and password in [sql]")
