"""Derive from the settings what Spark needs: whether a book exists, and the options of Kafka's Java client."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from tidebook.core.errors import InvalidInput, NotFound
from tidebook.log.sqlite.tables import FILE as LOG_FILE
from tidebook.store.sqlite.tables import FILE as STORE_FILE
from tidebook.tags.settings import TagSettings
from tidebook.wiring.adapters import extra
from tidebook.wiring.settings import Settings, adapter_options, options_as

_FILES = {"log": LOG_FILE, "store": STORE_FILE}


def has_part(settings: Settings, part: str) -> bool:
    """Return whether the log or the store of a book exists; a part on a server is assumed to exist."""
    return not settings.section(part).embedded or (settings.folder / _FILES[part]).is_file()


def require_book(settings: Settings, *, parts: Collection[str]) -> None:
    """Raise `NotFound` if a part of a book is missing; open nothing, since an adapter would create it."""
    for part in parts:
        if not has_part(settings, part):
            raise NotFound(
                f"there is no book in {settings.folder}: it has no {_FILES[part]}; "
                "use the folder or the tidebook.toml of a book that has data"
            )


def clears_tags(settings: Settings) -> bool:
    """Return whether deletes and purges are applied to the tag view."""
    found: TagSettings = options_as(settings.section("tags"), "tags", TagSettings)
    return found.deletes == "follow"


def kafka_client_options(settings: Settings) -> dict[str, str]:
    """Return the `[log]` section as options of Kafka's Java client. They may contain secrets."""
    section = settings.section("log")
    if section.url is None:
        raise InvalidInput("[log] has no url: an embedded log is not read through Kafka's client")
    kafka: Any = adapter_options(section, "log", extra("tidebook.kafka.settings", "kafka").KafkaSettings)
    options = {
        "bootstrap.servers": ",".join(kafka.servers),
        "client.id": kafka.client_id,
        "security.protocol": kafka.protocol.upper(),
        "request.timeout.ms": str(kafka.request_timeout_ms),
        "default.api.timeout.ms": str(2 * kafka.request_timeout_ms),
        # Otherwise a consumer of a deleted topic creates it, where the brokers allow that.
        "allow.auto.create.topics": "false",
        # The same isolation as every other reader: skipping a record would change the sequence numbers of a journal.
        "isolation.level": "read_uncommitted",
    }
    if kafka.protocol.startswith("sasl"):
        secret = kafka.secret()
        module = "plain.PlainLoginModule" if kafka.mechanism == "PLAIN" else "scram.ScramLoginModule"
        user, password = (
            text.replace("\\", r"\\").replace('"', r"\"")
            for text in (kafka.user, "" if secret is None else secret.reveal())
        )
        options["sasl.mechanism"] = kafka.mechanism
        options["sasl.jaas.config"] = (
            f'org.apache.kafka.common.security.{module} required username="{user}" password="{password}";'
        )
    if "ssl" in kafka.protocol:
        # The contents of the PEM files instead of their paths: executors may not have the files.
        if kafka.ca_file is not None:
            options["ssl.truststore.type"] = "PEM"
            options["ssl.truststore.certificates"] = _text(kafka.ca_file, "ca_file")
        if kafka.cert_file is not None and kafka.key_file is not None:
            options["ssl.keystore.type"] = "PEM"
            options["ssl.keystore.certificate.chain"] = _text(kafka.cert_file, "cert_file")
            options["ssl.keystore.key"] = _text(kafka.key_file, "key_file")
    return options


def _text(file: str, what: str) -> str:
    try:
        return Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"[log] for Kafka: {what} {file} cannot be read: {type(error).__name__}") from error
