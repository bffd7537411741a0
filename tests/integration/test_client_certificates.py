"""Servers that require TLS, a password and a client certificate: clients, and books from a settings file."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import acsylla
import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

import tidebook
from tests.integration.test_servers import connect, create_topic, first_value, produce
from tidebook.core.errors import InvalidInput, Unavailable
from tidebook.core.event import Event
from tidebook.store.cassandra.settings import PASSWORD_VARIABLE
from tidebook.testing.replicating import replicate
from tidebook.testing.servers import Cassandra, Credentials, Kafka, Security, make_security

pytestmark = [pytest.mark.kafka, pytest.mark.cassandra, pytest.mark.timeout(300)]

PASSWORD = "a-very-secret-word"
PIPELINE_S_MAX = 200
#: The last two occur when the server closes the connection.
REFUSALS = {KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN}


@pytest.fixture(scope="module")
def security(tmp_path_factory: pytest.TempPathFactory) -> Security:
    folder = tmp_path_factory.mktemp("certificates")
    return make_security(folder, Credentials("tidebook", PASSWORD), client_certificates=True)


@pytest.fixture(scope="module")
def guarded_kafka(tmp_path_factory: pytest.TempPathFactory, security: Security) -> Iterator[Kafka]:
    with Kafka(tmp_path_factory.mktemp("guarded") / "kafka", security=security).temporarily() as kafka:
        yield kafka


@pytest.fixture(scope="module")
def guarded_cassandra(tmp_path_factory: pytest.TempPathFactory, security: Security) -> Iterator[Cassandra]:
    with Cassandra(tmp_path_factory.mktemp("guarded") / "cassandra", security=security).temporarily() as cassandra:
        yield cassandra


def test_kafka_serves_a_client_with_certificate_and_password(guarded_kafka: Kafka) -> None:
    create_topic(guarded_kafka.client_settings(), "private")
    produce(guarded_kafka.client_settings(), "private", b"secret")
    assert first_value(guarded_kafka.client_settings(), "private") == b"secret"


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"security.protocol": "PLAINTEXT"}, id="no encryption"),
        pytest.param({"sasl.password": "wrong"}, id="wrong password"),
        pytest.param({"ssl.ca.location": "{0.stranger}"}, id="unknown authority"),
        pytest.param({"ssl.certificate.location": "", "ssl.key.location": ""}, id="no certificate"),
        pytest.param(
            {"ssl.certificate.location": "{0.stranger}", "ssl.key.location": "{0.stranger_key}"},
            id="a stranger's certificate",
        ),
    ],
)
def test_kafka_refuses_other_clients(guarded_kafka: Kafka, security: Security, wrong: Mapping[str, str]) -> None:
    changed = {name: value.format(security.certificates) for name, value in wrong.items()}
    settings = {name: value for name, value in (guarded_kafka.client_settings() | changed).items() if value}
    errors: list[KafkaError] = []
    config: dict[str, Any] = {**settings, "log_level": "0", "error_cb": errors.append}
    client = AdminClient(config)
    while not errors:
        client.poll(1)
    assert errors[0].code() in REFUSALS
    with pytest.raises(KafkaException):
        client.list_topics(timeout=0.5)


def accepted_options(security: Security) -> dict[str, object]:
    """Return the settings of a client that Cassandra accepts."""
    made = security.certificates
    return {
        "username": security.credentials.user,
        "password": security.credentials.password,
        "ssl_enabled": True,
        "ssl_trusted_cert": made.authority.read_text(),
        "ssl_cert": made.server.read_text(),
        "ssl_private_key": made.server_key.read_text(),
    }


async def test_cassandra_serves_a_client_with_certificate_and_password(
    guarded_cassandra: Cassandra, security: Security
) -> None:
    session = await connect(guarded_cassandra.address, **accepted_options(security))
    result = await session.execute(acsylla.create_statement("SELECT cluster_name FROM system.local"))
    assert result.first().cluster_name == "tidebook"
    await session.close()


@pytest.mark.parametrize(
    ("changed", "reported"),
    [
        pytest.param({"password": "wrong"}, acsylla.errors.CassErrorServerBadCredentials, id="wrong password"),
        pytest.param({"ssl_enabled": False}, acsylla.errors.CassErrorLibNoHostsAvailable, id="no encryption"),
        pytest.param(
            {"ssl_cert": None, "ssl_private_key": None},
            acsylla.errors.CassErrorLibNoHostsAvailable,
            id="no certificate",
        ),
    ],
)
async def test_cassandra_refuses_other_clients(
    guarded_cassandra: Cassandra, security: Security, changed: dict[str, object], reported: type[Exception]
) -> None:
    with pytest.raises(reported):
        await connect(guarded_cassandra.address, **accepted_options(security) | changed)


async def test_cassandra_shows_a_certificate_of_its_own_authority_only(
    guarded_cassandra: Cassandra, security: Security
) -> None:
    host, port = guarded_cassandra.address.split(":")
    stranger = ssl.create_default_context(cafile=str(security.certificates.stranger))
    with pytest.raises(ssl.SSLCertVerificationError):
        await asyncio.open_connection(host, int(port), ssl=stranger)


def write_settings(
    folder: Path, security: Security, log: Kafka | None, store: Cassandra | None, certificate: tuple[Path, Path] | None
) -> Path:
    """Write the settings of a book whose log, store or both are on the guarded servers."""
    (folder / "password").write_text(f"{PASSWORD}\n")
    common = f'user = "tidebook"\nca_file = "{security.certificates.authority}"\n'
    if certificate is not None:
        common += f'cert_file = "{certificate[0]}"\nkey_file = "{certificate[1]}"\n'
    text = 'folder = "data"\n[journal]\npartitions = 1\n'
    if log is not None:
        text += f'[log]\nurl = "{log.url}"\npassword_file = "{folder / "password"}"\n{common}'
    if store is not None:
        text += f'[store]\nurl = "{store.url}"\ntls = true\n{common}'
    (folder / "tidebook.toml").write_text(text)
    return folder / "tidebook.toml"


@pytest.fixture
def settings_file(
    tmp_path: Path,
    security: Security,
    guarded_kafka: Kafka,
    guarded_cassandra: Cassandra,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Return settings with one password in a file and the other in the environment."""
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    made = security.certificates
    return write_settings(tmp_path, security, guarded_kafka, guarded_cassandra, (made.server, made.server_key))


@pytest.fixture
def secrets(security: Security) -> list[str]:
    """Return a pattern of the secrets: the password, and any line of the private key."""
    return [PASSWORD, *security.certificates.server_key.read_text().splitlines()[1:-1]]


def topic_name() -> str:
    return f"guarded-{uuid.uuid4().hex[:8]}"


async def test_a_book_writes_replicates_and_reads_with_its_settings_file(
    settings_file: Path, secrets: list[str], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    topic = topic_name()
    async with tidebook.open(settings_file) as book:
        await book.journal(topic).append("a", [Event(1), Event(2)])
        await replicate(book.log, book.store, topic)
        await book.journal(topic).append("a", [Event(3)], expected=2)
        reported = f"{book!r} {book.settings!r} {book.log!r} {book.store!r} {vars(book.log)!r} {vars(book.store)!r}"
    async with tidebook.open(settings_file) as book:
        assert [event.payload async for event in book.journal(topic).read("a")] == [1, 2, 3]
    written = f"{reported} {caplog.text} {capfd.readouterr()}"
    assert [secret for secret in secrets if secret in written] == []


@pytest.mark.spark
async def test_the_pipeline_replicates_with_the_same_settings_file(settings_file: Path, secrets: list[str]) -> None:
    topic = topic_name()
    async with tidebook.open(settings_file) as book:
        await book.journal(topic).append("a", [Event(1), Event(2)])
        command = ["pipeline", "replicate", "--once", "--json", "--book", str(settings_file)]
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", "from tidebook.cli.app import main; main()", *command],
            env={name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_GATEWAY")},
            capture_output=True,
            text=True,
            check=False,
            timeout=PIPELINE_S_MAX,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        pointer = await book.store.pointer(topic, 0)
        assert pointer is not None
    assert [secret for secret in secrets if secret in done.stdout + done.stderr] == []


@pytest.mark.parametrize("whose", ["nobody's", "a stranger's"])
@pytest.mark.parametrize("part", ["log", "store"])
async def test_without_the_right_certificate_a_book_is_refused_and_reveals_no_secret(
    part: str,
    whose: str,
    tmp_path: Path,
    security: Security,
    secrets: list[str],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    made = security.certificates
    certificate = None if whose == "nobody's" else (made.stranger, made.stranger_key)
    log = request.getfixturevalue("guarded_kafka") if part == "log" else None
    store = request.getfixturevalue("guarded_cassandra") if part == "store" else None
    file = write_settings(tmp_path, security, log, store, certificate)
    if part == "log":
        file.write_text(file.read_text().replace("[log]\n", "[log]\nrequest_timeout_ms = 3000\n"))
    with pytest.raises((Unavailable, InvalidInput)) as caught:
        async with tidebook.open(file) as book:
            await book.journal(topic_name()).append("a", [Event(1)])
    chain: BaseException | None = caught.value
    secrets += made.stranger_key.read_text().splitlines()[1:-1]
    while chain is not None:
        assert [secret for secret in secrets if secret in f"{chain!r} {chain}"] == []
        chain = chain.__cause__
