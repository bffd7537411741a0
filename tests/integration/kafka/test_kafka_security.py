"""A listener that requires TLS and SCRAM; no error, repr or log line contains a password."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.kafka.conftest import OpenKafkaLog
from tidebook.core.errors import InvalidInput, Unavailable
from tidebook.kafka.settings import PASSWORD_VARIABLE
from tidebook.log.kafka import KafkaLog, KafkaSettings
from tidebook.log.port import Outgoing
from tidebook.runtime.metrics import Metrics
from tidebook.testing.servers import Credentials, Kafka, make_security

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]

PASSWORD = "a-very-secret-word"
WRONG = "not-the-secret-word"


@pytest.fixture(scope="module")
def secure_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    folder = tmp_path_factory.mktemp("secure-kafka")
    security = make_security(folder / "security", Credentials("tidebook", PASSWORD))
    with Kafka(folder / "kafka", security=security) as kafka:
        yield kafka


def authority(kafka: Kafka) -> str:
    assert kafka.security is not None
    return str(kafka.security.certificates.authority)


async def test_the_right_password_over_tls_is_accepted(
    secure_kafka: Kafka, open_log: OpenKafkaLog, topic: str, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    async with open_log(
        secure_kafka.url, user="tidebook", password_file=str(file), ca_file=authority(secure_kafka)
    ) as log:
        await log.create_topic(topic, 1)
        sent = await log.append(Outgoing(topic, 0, b"k", b"v"))
        assert [r.value for r in (await log.read(topic, 0, start=0, stop=sent.offset + 1)).records] == [b"v"]
        assert not await log.wait(topic, 0, offset=sent.offset + 1, timeout_s=0.1)


async def test_a_password_may_come_from_the_environment(secure_kafka: Kafka, topic: str) -> None:
    options = {"user": "tidebook", "ca_file": authority(secure_kafka)}
    settings = KafkaSettings.read(secure_kafka.url, options, environment={PASSWORD_VARIABLE: PASSWORD})
    log = KafkaLog(settings, metrics=Metrics())
    try:
        await log.create_topic(topic, 1)
        assert (await log.append(Outgoing(topic, 0, b"k", b"v"))).partition == 0
    finally:
        await log.close()


async def test_a_wrong_password_is_unavailable_and_is_not_disclosed(
    secure_kafka: Kafka, open_log: OpenKafkaLog, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with open_log(
        secure_kafka.url,
        user="tidebook",
        password=WRONG,
        ca_file=authority(secure_kafka),
        request_timeout_ms=3000,
        send_timeout_ms=3000,
    ) as log:
        doing = (log.topic(topic), log.topics(), log.append(Outgoing(topic, 0, b"k", b"v")))
        for reported in await asyncio.gather(*doing, return_exceptions=True):
            assert isinstance(reported, Unavailable)
            assert "password" in str(reported)  # the error names the settings to check
            assert WRONG not in f"{reported!r} {reported.__cause__!r}"
        assert WRONG not in repr(log.settings)
        assert WRONG not in repr(vars(log))
    assert WRONG not in caplog.text


@pytest.mark.parametrize("trust", ["stranger", "nothing"])
async def test_an_untrusted_server_does_not_receive_the_password(
    secure_kafka: Kafka, open_log: OpenKafkaLog, topic: str, trust: str
) -> None:
    assert secure_kafka.security is not None
    ca_file = str(secure_kafka.security.certificates.stranger) if trust == "stranger" else None
    options = {"user": "tidebook", "password": PASSWORD, "request_timeout_ms": 3000, "ca_file": ca_file}
    async with open_log(secure_kafka.url, **options) as log:
        with pytest.raises(Unavailable):
            await log.topic(topic)


async def test_a_plaintext_connection_is_refused(secure_kafka: Kafka, open_log: OpenKafkaLog, topic: str) -> None:
    async with open_log(secure_kafka.url, request_timeout_ms=3000) as log:
        with pytest.raises(Unavailable):
            await log.topic(topic)


async def test_a_missing_ca_file_is_reported(secure_kafka: Kafka, open_log: OpenKafkaLog, topic: str) -> None:
    async with open_log(secure_kafka.url, user="u", password=PASSWORD, ca_file="no-such-file.pem") as log:
        with pytest.raises(InvalidInput, match=r"no-such-file\.pem"):
            await log.topic(topic)
