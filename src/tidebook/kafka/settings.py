"""The settings of a Kafka cluster: connection, security, new topics, and the limits of the clients."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl

import msgspec

from tidebook.core.errors import InvalidInput
from tidebook.runtime.secret import QUOTE, Secret, check_identity, read_secret, read_user, split_url, with_password

PORT = 9092
PASSWORD_VARIABLE = "TIDEBOOK_LOG_PASSWORD"
DAY_MS = 86_400_000
_SERVER = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?")

Security = Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"]
Mechanism = Literal["SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"]
Compression = Literal["none", "lz4", "zstd", "snappy", "gzip"]


class KafkaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[log]` section of `tidebook.toml`, with `url = "kafka://host:9092"`.

    >>> KafkaSettings.read("kafka://one,two:9093", {"user": "me", "password": "hunter2"}).password
    ***
    """

    #: The brokers, from the URL.
    servers: tuple[str, ...]
    #: The name of the client in the cluster's quotas and logs.
    client_id: str = "tidebook"

    #: The replication factor of a new topic; by default that of the cluster.
    replication: int | None = None
    #: How many replicas of a new topic must have a record before it is acknowledged; by default as in the cluster.
    min_insync_replicas: int | None = None
    #: How long a new topic keeps its records (-1: forever). Replication must never lag by more than this.
    retention_ms: int = 7 * DAY_MS
    #: How many bytes of each partition a new topic keeps (-1: without limit).
    retention_bytes: int = -1

    #: By default `sasl_ssl` if a user is given, `ssl` if a CA or a certificate is given, else `plaintext`.
    security: Security | None = None
    #: How the user is authenticated.
    mechanism: Mechanism = "SCRAM-SHA-512"
    #: The user; without one, connections are not authenticated.
    user: str | None = None
    #: The user's password; it may also be in TIDEBOOK_LOG_PASSWORD.
    password: Secret | None = None
    #: A file with the password; it is read whenever a client is created.
    password_file: str | None = None
    #: A PEM file with the certificates of trusted authorities.
    ca_file: str | None = None
    #: A PEM file with the client's certificate, for mutual TLS.
    cert_file: str | None = None
    #: A PEM file with the key of the client's certificate.
    key_file: str | None = None

    #: How long a record waits for others before its batch is sent. At 0 a lone record is sent at once, and under load
    #: batches form by themselves.
    linger_ms: float = 0.0
    #: The compression of batches.
    compression: Compression = "none"
    #: The largest batch of records; never above a topic's limit.
    batch_bytes_max: int = 1_000_000
    #: Unacknowledged requests per broker. Records that arrive meanwhile form the next batch, so fewer requests are
    #: cheaper; raise it to 5 if a broker is milliseconds away and leads many partitions.
    requests_in_flight_max: int = 2
    #: How many records may be unacknowledged; further ones wait in this process.
    in_flight_records_max: int = 200_000
    #: How many bytes of records may be unacknowledged; further records wait in this process.
    in_flight_bytes_max: int = 256_000_000
    #: How long a record may wait for its acknowledgement before its outcome is unknown.
    send_timeout_ms: int = 30_000
    #: The timeout of any other request.
    request_timeout_ms: int = 10_000

    #: The largest number of consumers for reads.
    consumers_max: int = 4
    #: How long an idle consumer stays open.
    consumer_idle_ms: int = 60_000
    #: How many bytes one consumer may prefetch.
    prefetch_bytes_max: int = 16_000_000
    #: How many bytes of one followed partition are kept in memory.
    tail_bytes_max: int = 4_000_000
    #: How long a partition is followed after its last use.
    tail_idle_ms: int = 10_000

    @classmethod
    def read(
        cls, url: str, options: Mapping[str, Any] | None = None, *, environment: Mapping[str, str] | None = None
    ) -> KafkaSettings:
        """Return the settings from a URL and further options; the password may come from the environment."""
        given = {**_from_url(url), **(options or {})}
        given = with_password(given, PASSWORD_VARIABLE, os.environ if environment is None else environment)
        try:
            return msgspec.convert(given, cls, dec_hook=read_secret, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidInput(f"[log] for Kafka: {error}") from error

    def __post_init__(self) -> None:
        for server in self.servers:
            if not _SERVER.fullmatch(server):
                # The value is not shown: it may be a part of a password.
                raise InvalidInput(
                    f"each server of a Kafka URL is written host:port, as in kafka://host:9092,host:9092{QUOTE}"
                )
        if not self.servers:
            raise InvalidInput("a Kafka URL needs at least one server: kafka://host:9092")
        if self.protocol.startswith("sasl") and self.user is None:
            raise InvalidInput(f"security {self.protocol} needs a user and a password, or a password_file")
        if self.user is not None and not self.protocol.startswith("sasl"):
            raise InvalidInput(f"a user is given but security is {self.protocol}: set it to sasl_ssl")
        for name in ("ca_file", "cert_file", "key_file"):
            if getattr(self, name) is not None and "ssl" not in self.protocol:
                raise InvalidInput(f"{name} is given but security is {self.protocol}: set it to ssl or sasl_ssl")
        check_identity(self.password, self.password_file, self.cert_file, self.key_file)
        if self.requests_in_flight_max > 5:
            raise InvalidInput(
                "requests_in_flight_max must be at most 5: brokers detect duplicates only among the last 5"
            )
        for name in self.__struct_fields__:
            if name.endswith(("_max", "_timeout_ms", "_idle_ms")) and getattr(self, name) < 1:
                raise InvalidInput(f"{name} must be at least 1")

    @property
    def protocol(self) -> Security:
        """The security protocol: `security`, or the default that the other settings imply."""
        if self.security is not None:
            return self.security
        if self.user is not None:
            return "sasl_ssl"
        return "plaintext" if self.ca_file is None and self.cert_file is None else "ssl"

    def secret(self) -> Secret | None:
        """Return the password, from the settings or from `password_file`; raise InvalidInput if that is unreadable."""
        if self.password is not None or self.password_file is None:
            return self.password
        try:
            return Secret(Path(self.password_file).read_text().rstrip("\r\n"))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"password_file {self.password_file}: {type(error).__name__}") from error


def _from_url(url: str) -> dict[str, Any]:
    parts = split_url(url, "the URL of a Kafka log")
    if parts.scheme != "kafka":
        raise InvalidInput("the URL of a Kafka log has the form kafka://host:9092")
    if parts.path.strip("/") or parts.fragment:
        raise InvalidInput(f"a Kafka URL has no path: topics are named where journals are opened{QUOTE}")
    user_info, _, hosts = parts.netloc.rpartition("@")
    servers = [server.strip() for server in hosts.split(",") if server.strip()]
    given: dict[str, Any] = dict(parse_qsl(parts.query))
    if "password" in given:
        raise InvalidInput("a password is not an option of a URL: use password_file, or TIDEBOOK_LOG_PASSWORD")
    given["servers"] = tuple(
        server if server.rpartition("]")[2].count(":") == 1 else f"{server}:{PORT}" for server in servers
    )
    return given | read_user(user_info)
