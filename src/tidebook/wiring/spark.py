"""What Spark's own connectors must be told, so that they reach the very servers that the settings name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidebook.core.errors import InvalidInput
from tidebook.wiring.adapters import extra
from tidebook.wiring.settings import Settings


def kafka_client_options(settings: Settings) -> dict[str, str]:
    """The `[log]` section as options of a Java client of Kafka. They may hold secrets."""
    section = settings.section("log")
    if section.url is None:
        raise InvalidInput("[log] has no url: an embedded log is not read through Kafka's client")
    kafka: Any = extra("tidebook.log.kafka.settings", "kafka").KafkaSettings.read(section.url, section.options)
    options = {
        "bootstrap.servers": ",".join(kafka.servers),
        "client.id": kafka.client_id,
        "security.protocol": kafka.protocol.upper(),
        "request.timeout.ms": str(kafka.request_timeout_ms),
        "default.api.timeout.ms": str(2 * kafka.request_timeout_ms),
        # As every other reader of the log, or they would number a journal differently.
        "isolation.level": "read_uncommitted",
    }
    if kafka.protocol.startswith("sasl"):
        secret = kafka.secret()
        options["sasl.mechanism"] = kafka.mechanism
        options["sasl.jaas.config"] = _jaas(kafka.mechanism, kafka.user, "" if secret is None else secret.reveal())
    if "ssl" in kafka.protocol:
        options |= _tls(kafka.ca_file, kafka.cert_file, kafka.key_file)
    return options


def _jaas(mechanism: str, user: str, password: str) -> str:
    module = "plain.PlainLoginModule" if mechanism == "PLAIN" else "scram.ScramLoginModule"
    name = f"org.apache.kafka.common.security.{module}"
    return f"{name} required username={_quoted(user)} password={_quoted(password)};"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _tls(ca_file: str | None, cert_file: str | None, key_file: str | None) -> dict[str, str]:
    """The texts of the PEM files themselves, for the executors need not have the files."""
    options: dict[str, str] = {}
    if ca_file is not None:
        options |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": _text(ca_file, "ca_file")}
    if cert_file is not None and key_file is not None:
        options |= {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.certificate.chain": _text(cert_file, "cert_file"),
            "ssl.keystore.key": _text(key_file, "key_file"),
        }
    return options


def _text(file: str, what: str) -> str:
    try:
        return Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"[log] for Kafka: {what} {file} cannot be read: {type(error).__name__}") from error
