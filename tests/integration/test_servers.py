"""The real servers answer, and their harness does what tests of faults rely on."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import acsylla
import psycopg
import pymysql
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tidebook.testing.servers import Cassandra, Kafka, Postgres, Security, ServerError, make_security

ANSWER_S_MAX = 30.0


def create_topic(settings: dict[str, str], topic: str) -> None:
    admin = AdminClient({**settings})  # kept while it works: what it owes ends with it
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


@pytest.mark.kafka
def test_kafka_gives_back_what_was_produced(kafka_bootstrap: str) -> None:
    settings = {"bootstrap.servers": kafka_bootstrap}
    create_topic(settings, "servers-answer")
    produce(settings, "servers-answer", b"tide")
    assert first_value(settings, "servers-answer") == b"tide"


@pytest.mark.cassandra
async def test_cassandra_answers(cassandra_address: str) -> None:
    host, port = cassandra_address.split(":")
    session = await acsylla.create_cluster([host], port=int(port)).create_session(keyspace="tidebook")
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
def test_a_killed_kafka_comes_back_with_its_data_at_the_same_address(tmp_path: Path) -> None:
    with Kafka(tmp_path / "kafka") as kafka:
        address = kafka.address
        create_topic(kafka.client_settings(), "kept")
        produce(kafka.client_settings(), "kept", b"before")
        kafka.kill9()
        assert not kafka.alive()
        kafka.restart()
        assert kafka.address == address
        assert first_value(kafka.client_settings(), "kept") == b"before"


@pytest.mark.postgres
def test_a_killed_postgres_comes_back_with_its_data(tmp_path: Path) -> None:
    postgres = Postgres(tmp_path / "postgres").start()
    try:
        with psycopg.connect(postgres.url) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 1 AS x")
        postgres.kill9()
        postgres.restart()
        with psycopg.connect(postgres.url) as connection:
            assert connection.execute("SELECT x FROM kept").fetchone() == (1,)
    finally:
        postgres.remove()


@pytest.mark.postgres
def test_a_paused_server_answers_only_after_it_is_resumed(tmp_path: Path) -> None:
    postgres = Postgres(tmp_path / "postgres").start()
    try:
        postgres.pause()
        with pytest.raises(psycopg.errors.ConnectionTimeout):
            psycopg.connect(postgres.url, connect_timeout=2)
        postgres.resume()
        psycopg.connect(postgres.url, connect_timeout=10).close()
    finally:
        postgres.remove()


@pytest.mark.postgres
def test_a_second_start_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    postgres = Postgres(tmp_path / "postgres").start()
    try:
        with pytest.raises(ServerError, match="runs already"):
            Postgres(tmp_path / "postgres").start()
    finally:
        postgres.remove()


@pytest.fixture(scope="module")
def security(tmp_path_factory: pytest.TempPathFactory) -> Security:
    return make_security(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secured_kafka(tmp_path_factory: pytest.TempPathFactory, security: Security) -> Iterator[Kafka]:
    with Kafka(tmp_path_factory.mktemp("kafka"), security=security) as kafka:
        yield kafka


@pytest.fixture(scope="module")
def secured_cassandra(tmp_path_factory: pytest.TempPathFactory, security: Security) -> Iterator[Cassandra]:
    with Cassandra(tmp_path_factory.mktemp("cassandra"), security=security) as cassandra:
        yield cassandra


@pytest.mark.kafka
def test_a_secured_kafka_serves_a_client_with_certificate_and_password(secured_kafka: Kafka) -> None:
    create_topic(secured_kafka.client_settings(), "private")
    produce(secured_kafka.client_settings(), "private", b"secret")
    assert first_value(secured_kafka.client_settings(), "private") == b"secret"


@pytest.mark.kafka
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"security.protocol": "PLAINTEXT"}, id="no encryption"),
        pytest.param({"sasl.password": "wrong"}, id="wrong password"),
        pytest.param({"ssl.ca.location": "stranger"}, id="unknown authority"),
    ],
)
def test_a_secured_kafka_refuses_other_clients(secured_kafka: Kafka, wrong: dict[str, str]) -> None:
    assert secured_kafka.security is not None
    settings = secured_kafka.client_settings() | wrong
    if settings["ssl.ca.location"] == "stranger":
        settings["ssl.ca.location"] = str(secured_kafka.security.certificates.stranger)
    with pytest.raises(KafkaException):
        AdminClient({**settings, "log_level": "0"}).list_topics(timeout=3)


async def connect(cassandra: Cassandra, **options: object) -> acsylla.Session:
    host, port = cassandra.address.split(":")
    return await acsylla.create_cluster([host], port=int(port), **options).create_session(keyspace="tidebook")


@pytest.mark.cassandra
async def test_a_secured_cassandra_serves_a_client_with_certificate_and_password(secured_cassandra: Cassandra) -> None:
    assert secured_cassandra.security is not None
    told = secured_cassandra.security
    session = await connect(
        secured_cassandra,
        username=told.credentials.user,
        password=told.credentials.password,
        ssl_enabled=True,
        ssl_trusted_cert=told.certificates.authority.read_text(),
    )
    result = await session.execute(acsylla.create_statement("SELECT cluster_name FROM system.local"))
    assert result.first().cluster_name == "tidebook"
    await session.close()


@pytest.mark.cassandra
async def test_a_secured_cassandra_refuses_a_client_without_encryption(secured_cassandra: Cassandra) -> None:
    with pytest.raises(acsylla.errors.CassErrorLibNoHostsAvailable):
        await connect(secured_cassandra, username="tidebook", password="tide-and-time")


@pytest.mark.cassandra
async def test_a_secured_cassandra_refuses_a_wrong_password(secured_cassandra: Cassandra) -> None:
    assert secured_cassandra.security is not None
    trusted = secured_cassandra.security.certificates.authority.read_text()
    with pytest.raises(acsylla.errors.CassErrorServerBadCredentials):
        await connect(
            secured_cassandra, username="tidebook", password="wrong", ssl_enabled=True, ssl_trusted_cert=trusted
        )


@pytest.mark.cassandra
async def test_a_secured_cassandra_shows_a_certificate_of_its_own_authority_only(
    secured_cassandra: Cassandra,
) -> None:
    assert secured_cassandra.security is not None
    host, port = secured_cassandra.address.split(":")
    stranger = ssl.create_default_context(cafile=str(secured_cassandra.security.certificates.stranger))
    with pytest.raises(ssl.SSLCertVerificationError):
        await asyncio.open_connection(host, int(port), ssl=stranger)
