"""Outages: a broker is down, a database restarts, a relay is stopped during an outage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.outbox.databases import Database
from tests.integration.outbox.relaying import Cluster, opened_store, publish, running, until
from tidebook import outbox
from tidebook.core.errors import Unavailable
from tidebook.outbox.kafka.producer import closing_count
from tidebook.outbox.port import RelayedMessage
from tidebook.outbox.settings import OutboxSettings
from tidebook.testing.servers import Kafka, Postgres

pytestmark = [pytest.mark.kafka, pytest.mark.postgres]

QUICK = OutboxSettings(lock_limit_s=3, rest_s=0.3, poll_s=0.1, stop_s=2, batch_rows=50)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """Start a separate Kafka that tests may kill; each leaves it running."""
    with Kafka(tmp_path_factory.mktemp("broker") / "kafka").temporarily() as kafka:
        yield kafka


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Postgres]:
    """Start a separate PostgreSQL that the test may kill."""
    with Postgres(tmp_path / "postgres").temporarily() as postgres:
        yield postgres


def pairs(start: int, stop: int) -> list[tuple[bytes, bytes]]:
    return [(b"k", str(n).encode()) for n in range(start, stop)]


def numbers(cluster: Cluster, topic: str) -> list[int]:
    return [int(each.value or b"") for each in cluster.read(topic)]


@pytest.mark.parametrize("fence", ["timestamp", "transaction"])
def test_a_broker_outage_loses_and_reorders_no_message(postgres: Database, broker: Kafka, fence: str) -> None:
    cluster = Cluster(broker.address)
    topic = cluster.topic(partitions=1)
    settings = OutboxSettings(lock_limit_s=3, rest_s=0.3, poll_s=0.1, batch_rows=50, fence=fence)  # type: ignore[arg-type]
    with running(cluster.relay(postgres, settings)) as relay:
        publish(postgres, topic, *pairs(0, 500))
        until(lambda: relay.metrics.counted("outbox_sent") > 50, "some are sent")
        broker.kill9()
        try:
            publish(postgres, topic, *pairs(500, 1000))
            until(lambda: relay.metrics.counted("outbox_rests") > 0, "the topic rests")
            with opened_store(postgres) as store:
                [status] = store.status(count_max=10_000)
            assert status.waiting > 0
        finally:
            broker.restart()
        until(lambda: postgres.waiting() == 0, "everything is sent")
    assert numbers(cluster, topic) == list(range(1000))
    cluster.close()


def test_a_database_restart_loses_and_reorders_no_message(server: Postgres, cluster: Cluster) -> None:
    database = Database("postgresql", server.url)
    with database.connect() as connection:
        outbox.create_tables(connection)
        connection.commit()
    topic = cluster.topic(partitions=1)
    with running(cluster.relay(database, QUICK)) as relay:
        publish(database, topic, *pairs(0, 2000))
        until(lambda: relay.metrics.counted("outbox_sent") > 100, "some are sent")
        server.kill9()
        server.restart()
        until(lambda: _waiting(database) == 0, "everything is sent")
    assert numbers(cluster, topic) == list(range(2000))
    [status] = _status(database)
    assert status.relayed == 2000


def _waiting(database: Database) -> int:
    try:
        return database.waiting()
    except Exception:
        return -1


def _status(database: Database):  # type: ignore[no-untyped-def]
    with opened_store(database) as store:
        return store.status(count_max=10)


def test_a_relay_that_is_stopped_during_a_broker_outage_ends(postgres: Database, broker: Kafka, tmp_path: Path) -> None:
    """The batch in flight cannot be completed after SIGTERM: it is dropped, and the next relay scans for it."""
    cluster = Cluster(broker.address)
    topic = cluster.topic(partitions=1)
    (tmp_path / "tidebook.toml").write_text(
        f'[log]\nurl = "kafka://{broker.address}"\n[sql]\nurl = "{postgres.url}"\n'
        "[outbox]\nlock_limit_s = 30\nstop_s = 1\nbatch_rows = 100\n"
    )
    command = [sys.executable, "-m", "tidebook.cli.app", "outbox", "relay", "--book", str(tmp_path / "tidebook.toml")]
    publish(postgres, topic, *pairs(0, 5_000))
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        until(lambda: postgres.waiting() < 5_000, "the relay works")
        broker.pause()
        until(lambda: _status(postgres)[0].dirty, "a batch is being sent")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
        broker.resume()
    [status] = _status(postgres)
    assert status.locked_by is None
    assert status.dirty
    with running(cluster.relay(postgres, QUICK)):
        until(lambda: postgres.waiting() == 0, "everything is sent")
    assert numbers(cluster, topic) == list(range(5_000))
    cluster.close()


@pytest.mark.parametrize("fence", ["timestamp", "transaction"])
def test_a_dropped_producer_ends_although_its_broker_does_not_answer(broker: Kafka, fence: str) -> None:
    cluster = Cluster(broker.address)
    name = cluster.topic(partitions=1)
    target = cluster.target(OutboxSettings(fence=fence))  # type: ignore[arg-type]
    topic = target.topic(name)
    channel = target.channel(topic, fresh=True)
    producer = weakref.ref(channel._producer)
    # More than a socket buffers.
    messages = [RelayedMessage(n, b"k", None, os.urandom(1_000), []) for n in range(20_000)]
    broker.pause()
    try:
        channel.start(messages, timestamp_ms=round(time.time() * 1000))
        for _ in range(2):
            assert channel.wait(0.3) is None
        channel.drop()
        del channel
        until(lambda: producer() is None and not closing_count(), "the producer is closed", timeout_s=10)
    finally:
        broker.resume()
        del target  # the traceback of the client's exception may keep this frame alive after the test
    assert len(cluster.read(name)) < len(messages)
    cluster.close()


def test_a_query_on_a_silent_database_times_out(postgres: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is still reachable: neither a TCP timeout nor one of the server would end the wait."""
    with opened_store(postgres) as store:
        publish(postgres, "t", (b"k", b"1"))
        hold = store.try_lock("t", lock_id=bytes(16), owner="test")
        assert hold is not None
        [[server]] = postgres.query(
            "SELECT pid FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'tidebook-outbox'"
        )
        monkeypatch.setattr("tidebook.postgres.connect.ANSWER_S_MAX", 0.5)
        os.kill(server, signal.SIGSTOP)
        try:
            with pytest.raises(Unavailable, match="no answer"):
                store.heartbeat(hold)
            with pytest.raises(Unavailable):  # this time without a wait
                store.heartbeat(hold)
        finally:
            os.kill(server, signal.SIGCONT)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_relay_finishes_its_current_batch_before_it_stops(
    postgres: Database, cluster: Cluster, tmp_path: Path, number: signal.Signals
) -> None:
    topic = cluster.topic()
    (tmp_path / "tidebook.toml").write_text(
        f'[log]\nurl = "kafka://{cluster.bootstrap}"\n[sql]\nurl = "{postgres.url}"\n[outbox]\nbatch_rows = 50\n'
    )
    publish(postgres, topic, *pairs(0, 5_000))
    command = [sys.executable, "-m", "tidebook.cli.app", "outbox", "relay", "--book", str(tmp_path / "tidebook.toml")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        until(lambda: postgres.waiting() < 5_000, "the relay works")
        process.send_signal(number)
        reported, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == (130 if number == signal.SIGINT else 0)
    assert b'"relayed"' in reported
    [status] = _status(postgres)
    assert (status.locked_by, status.dirty) == (None, False)
    assert len(numbers(cluster, topic)) + postgres.waiting() == 5_000
