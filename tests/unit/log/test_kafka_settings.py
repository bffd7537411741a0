"""The settings of a Kafka log: how a URL and options are read, and that no secret is shown."""

from __future__ import annotations

import pickle
from pathlib import Path

import msgspec
import pytest

from tidebook.core.errors import InvalidInput, NotFound, OutcomeUnknown, Unavailable

pytest.importorskip("confluent_kafka")

from confluent_kafka import KafkaError

from tidebook.kafka.client import common_config, consumer_config, producer_config
from tidebook.kafka.errors import failed, not_acknowledged, not_sent
from tidebook.kafka.settings import KafkaSettings
from tidebook.log.kafka.topics import check_requested, check_topic, new_topic_config
from tidebook.runtime.secret import Secret

PASSWORD = "a-very-secret-word"


def read(url: str, options: dict[str, object] | None = None, **environment: str) -> KafkaSettings:
    return KafkaSettings.read(url, options, environment=environment)


def test_a_url_names_one_or_more_servers() -> None:
    assert read("kafka://one:1234").servers == ("one:1234",)
    assert read("kafka://one:1234,two,[::1]:7").servers == ("one:1234", "two:9092", "[::1]:7")


def test_options_may_be_given_in_the_url_or_separately() -> None:
    assert read("kafka://h?linger_ms=2&compression=lz4").linger_ms == 2
    assert read("kafka://h?linger_ms=2", {"linger_ms": 3}).linger_ms == 3


@pytest.mark.parametrize(
    ("url", "options", "reported"),
    [
        ("http://host", {}, "kafka://"),
        ("kafka://", {}, "at least one server"),
        ("kafka://host/topic", {}, "no path"),
        ("kafka://ho st:1", {}, "written host:port"),
        ("kafka://host", {"lingerms": 3}, "lingerms"),
        ("kafka://host", {"compression": "rar"}, "compression"),
        ("kafka://host", {"consumers_max": 0}, "consumers_max"),
        ("kafka://host", {"security": "sasl_ssl"}, "user"),
        ("kafka://host", {"security": "plaintext", "user": "u", "password": "p"}, "sasl_ssl"),
        ("kafka://host", {"security": "plaintext", "ca_file": "ca.pem"}, "ca_file"),
        ("kafka://host", {"security": "plaintext", "cert_file": "me.pem", "key_file": "me.key"}, "cert_file"),
        ("kafka://host", {"ca_file": "ca.pem", "cert_file": "me.pem"}, "go together"),
        ("kafka://host", {"ca_file": "ca.pem", "key_file": "me.key"}, "go together"),
        ("kafka://host", {"user": "u", "password": "p", "password_file": "f"}, "both"),
        (f"kafka://host?password={PASSWORD}", {}, "password_file"),
        ("kafka://host", {"password": 7, "user": "u"}, "password"),
    ],
)
def test_invalid_urls_and_options_are_refused(url: str, options: dict[str, object], reported: str) -> None:
    with pytest.raises(InvalidInput, match=reported) as caught:
        read(url, options)
    assert PASSWORD not in str(caught.value)


def test_the_security_protocol_follows_from_the_options() -> None:
    assert read("kafka://h").protocol == "plaintext"
    assert read("kafka://h", {"ca_file": "ca.pem"}).protocol == "ssl"
    assert read("kafka://h", {"cert_file": "me.pem", "key_file": "me.key"}).protocol == "ssl"
    assert read("kafka://me:pw@h").protocol == "sasl_ssl"
    assert read("kafka://me:pw@h", {"security": "sasl_plaintext"}).protocol == "sasl_plaintext"


def test_a_password_comes_from_the_url_an_option_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    for settings in (
        read(f"kafka://me:{PASSWORD}@h"),
        read("kafka://me@h", {"password": PASSWORD}),
        read("kafka://me@h", {"password_file": str(file)}),
        read("kafka://me@h", TIDEBOOK_LOG_PASSWORD=PASSWORD),
    ):
        assert settings.secret() == Secret(PASSWORD)
        assert common_config(settings)["sasl.password"] == PASSWORD
    with pytest.raises(InvalidInput, match="password_file"):
        read("kafka://me@h", {"password_file": str(tmp_path / "missing")}).secret()


@pytest.mark.parametrize("cut", ["?", "#", "/", ":", "@"])
def test_a_password_with_a_character_that_splits_the_url_is_not_shown(cut: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read(f"kafka://me:hunter{cut}secret@host/x")
    assert "hunter" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_password_is_shown_nowhere() -> None:
    settings = read(f"kafka://me:{PASSWORD}@h")
    assert PASSWORD not in f"{settings!r} {settings} {settings.password!r} {settings.password}"
    assert "***" in repr(settings)
    with pytest.raises(TypeError):
        msgspec.json.encode(settings)
    with pytest.raises(TypeError):
        pickle.dumps(settings.password)


def test_producers_are_idempotent_and_acknowledged_by_all() -> None:
    config = producer_config(read("kafka://h"), batch_bytes=1000)
    assert (config["acks"], config["enable.idempotence"], config["batch.size"]) == ("all", True, 1000)
    assert config["allow.auto.create.topics"] is False


def test_consumers_commit_no_offsets_and_never_reset_them() -> None:
    config = consumer_config(read("kafka://h"), fetch_wait_ms=5)
    assert (config["enable.auto.commit"], config["auto.offset.reset"]) == (False, "error")


def test_a_new_topic_passes_its_own_check() -> None:
    config = new_topic_config(read("kafka://h"), limit_bytes=1000, keep_forever=True)
    check_topic("t", config)
    check_requested("t", config, limit_bytes=1000, keep_forever=True)
    with pytest.raises(InvalidInput, match="compact"):
        check_topic("t", config | {"cleanup.policy": "compact"})


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (KafkaError._MSG_TIMED_OUT, OutcomeUnknown),
        (KafkaError._PURGE_INFLIGHT, OutcomeUnknown),
        (KafkaError._PURGE_QUEUE, OutcomeUnknown),
        (KafkaError._TRANSPORT, OutcomeUnknown),
        (KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND, OutcomeUnknown),
        (KafkaError.INVALID_PRODUCER_EPOCH, OutcomeUnknown),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, OutcomeUnknown),
        (KafkaError._UNKNOWN_TOPIC, OutcomeUnknown),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, OutcomeUnknown),
        (KafkaError.INVALID_RECORD, InvalidInput),
    ],
)
def test_a_record_without_acknowledgement_is_unknown_unless_it_was_refused(code: int, kind: type[Exception]) -> None:
    error = not_acknowledged(KafkaError(code), "t", 3)
    assert type(error) is kind
    assert "t/3" in str(error)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (KafkaError._TIMED_OUT, Unavailable),
        (KafkaError._ALL_BROKERS_DOWN, Unavailable),
        (KafkaError._AUTHENTICATION, Unavailable),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, NotFound),
        (KafkaError.INVALID_REPLICATION_FACTOR, InvalidInput),
    ],
)
def test_a_request_that_fails_has_changed_nothing(code: int, kind: type[Exception]) -> None:
    assert type(failed(KafkaError(code), "asking")) is kind


#: All error codes of the client and the brokers.
EVERY_CODE = sorted(
    {code for name in dir(KafkaError) if name.isupper() and isinstance(code := getattr(KafkaError, name), int)}
    - {KafkaError.NO_ERROR}
)


def test_every_error_code_is_translated_into_one_of_few_errors() -> None:
    assert len(EVERY_CODE) > 150
    for code in EVERY_CODE:
        assert isinstance(failed(KafkaError(code), "asking"), Unavailable | NotFound | InvalidInput), code
        assert isinstance(not_acknowledged(KafkaError(code), "t", 3), OutcomeUnknown | InvalidInput), code
        assert isinstance(not_sent(KafkaError(code), "t", 3), Unavailable | NotFound | InvalidInput), code
