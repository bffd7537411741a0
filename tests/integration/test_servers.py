"""The real servers answer, and their harness works as fault tests require."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import acsylla
import psycopg
import pymysql
import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

import tidebook
from tests.conftest import status_file
from tidebook.core.event import Event
from tidebook.testing.servers import Kafka, Postgres, ServerError

ANSWER_S_MAX = 30.0


def create_topic(settings: dict[str, str], topic: str) -> None:
    admin = AdminClient({**settings})  # must exist until its futures are done
    [created] = admin.create_topics([NewTopic(topic, 1, 1)]).values()
    created.result(ANSWER_S_MAX)


def produce(settings: dict[str, str], topic: str, value: bytes) -> None:
    failures: list[KafkaError] = []
    producer = Producer({**settings, "acks": "all"})
    producer.produce(topic, value, on_delivery=lambda error, _: failures.append(error) if error else None)
    assert producer.flush(ANSWER_S_MAX) == 0
    assert not failures


def first_value(settings: dict[str, str], topic: str) -> bytes | None:
    consumer = Consumer({**settings, "group.id": "test", "auto.offset.reset": "earliest"})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        message: Message | None = consumer.poll(ANSWER_S_MAX)
        assert message is not None
        assert message.error() is None
        value: bytes | None = message.value()
        return value
    finally:
        consumer.close()


async def connect(address: str, **options: object) -> acsylla.Session:
    host, port = address.split(":")
    return await acsylla.create_cluster([host], port=int(port), **options).create_session(keyspace="tidebook")


@pytest.mark.kafka
def test_kafka_returns_what_was_produced(kafka_bootstrap: str) -> None:
    settings = {"bootstrap.servers": kafka_bootstrap}
    topic = f"servers-answer-{uuid.uuid4().hex[:8]}"  # a developer's servers outlive a run
    create_topic(settings, topic)
    produce(settings, topic, b"tide")
    assert first_value(settings, topic) == b"tide"


@pytest.mark.cassandra
async def test_cassandra_answers(cassandra_address: str) -> None:
    session = await connect(cassandra_address)
    result = await session.execute(acsylla.create_statement("SELECT release_version FROM system.local"))
    assert result.first().release_version == "5.0.9"
    await session.close()


@pytest.mark.postgres
def test_postgres_answers(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SHOW server_version").fetchone() == ("18.6",)


@pytest.mark.mariadb
def test_mariadb_answers(mariadb_url: str) -> None:
    url = urlsplit(mariadb_url)
    with (
        pymysql.connect(host=url.hostname, port=url.port or 0, user=url.username, database=url.path[1:]) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute("SELECT DATABASE(), VERSION()")
        database, version = cursor.fetchone() or ("", "")
    assert (database, "MariaDB" in version) == ("tidebook", True)


@pytest.mark.kafka
def test_a_killed_kafka_restarts_with_its_data_at_the_same_address(tmp_path: Path) -> None:
    with Kafka(tmp_path / "kafka") as kafka:
        address = kafka.address
        create_topic(kafka.client_settings(), "kept")
        produce(kafka.client_settings(), "kept", b"before")
        kafka.kill9()
        assert not kafka.alive()
        kafka.restart()
        assert kafka.address == address
        assert first_value(kafka.client_settings(), "kept") == b"before"


@pytest.mark.kafka
@pytest.mark.timeout(300)  # it starts a broker twice, and makes certificates
def test_the_python_of_the_page_about_servers_runs(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "howto" / "servers.md"
    [block] = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    used: list[str] = []
    names: dict[str, Any] = {"tmp_path": tmp_path, "use": used.append}
    exec(compile(block, str(page), "exec"), names)
    assert used == [names["kafka"].address]
    assert names["secured_kafka"].client_settings()["security.protocol"] == "SASL_SSL"


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    """Start a separate server; each test leaves it running."""
    with Postgres(tmp_path_factory.mktemp("postgres") / "server").temporarily() as postgres:
        yield postgres


@pytest.mark.postgres
def test_a_killed_postgres_restarts_with_its_data(postgres: Postgres) -> None:
    with psycopg.connect(postgres.url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1 AS x")
    postgres.kill9()
    postgres.restart()
    with psycopg.connect(postgres.url) as connection:
        assert connection.execute("SELECT x FROM kept").fetchone() == (1,)


@pytest.mark.postgres
def test_a_paused_server_answers_only_after_it_is_resumed(postgres: Postgres) -> None:
    postgres.pause()
    try:
        with pytest.raises(psycopg.errors.ConnectionTimeout):
            psycopg.connect(postgres.url, connect_timeout=2)
    finally:
        postgres.resume()
    psycopg.connect(postgres.url, connect_timeout=10).close()


@pytest.mark.postgres
def test_a_second_start_in_the_same_folder_is_refused(postgres: Postgres) -> None:
    with pytest.raises(ServerError, match="is already running"):
        Postgres(postgres.folder).start()


def command(home: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run `./dev servers …` without its set-up; return the exit code and the printed status."""
    line = [sys.executable, "-m", "tidebook.testing.servers", *arguments, "--home", str(home), "--json"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=ANSWER_S_MAX)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.postgres
def test_servers_are_started_shown_and_stopped_by_the_command(tmp_path: Path) -> None:
    home = tmp_path / "servers"
    assert command(home, "status", "--only", "postgres") == (1, {"servers": {}, "book": None})
    try:
        code, started = command(home, "start", "--only", "postgres")
        assert code == 0
        reported = started["servers"]["postgres"]
        with psycopg.connect(reported["url"]) as connection:
            connection.execute("SELECT 1")
        assert json.loads((home / "status.json").read_text())["servers"]["postgres"] == reported
        assert tomllib.loads(Path(started["book"]).read_text()) == {"sql": {"url": reported["url"]}}
        assert command(home, "start", "--only", "postgres") == (0, started)  # it already runs
        assert command(home, "status", "--only", "postgres") == (0, started)
        assert command(home, "status")[0] == 1  # the other servers do not run
    finally:
        code, stopped = command(home, "stop")
    assert (code, stopped["servers"]) == (0, {})
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(reported["url"], connect_timeout=2)
    assert command(home, "stop", "--remove")[0] == 0
    assert not (home / "postgres").exists()


@pytest.mark.kafka
@pytest.mark.cassandra
@pytest.mark.postgres
@pytest.mark.usefixtures("kafka_bootstrap", "cassandra_address", "postgres_url")
async def test_the_settings_file_of_the_servers_opens_a_book_on_them() -> None:
    file = status_file().with_name("tidebook.toml")
    assert {name: url.split(":")[0] for name, url in sections(file)} == {
        "log": "kafka",
        "store": "cassandra",
        "sql": "postgresql",
    }
    async with tidebook.open(file) as book:
        journal = book.journal(f"servers-{uuid.uuid4().hex[:8]}")
        await journal.append("a", [Event(1)])
        assert [event.payload async for event in journal.read("a")] == [1]


def sections(file: Path) -> list[tuple[str, str]]:
    return [(name, section["url"]) for name, section in tomllib.loads(file.read_text()).items()]
