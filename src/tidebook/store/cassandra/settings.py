"""The settings of the Cassandra store: addresses, authentication, consistency levels, timeouts and limits."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from tidebook.core.errors import InvalidInput
from tidebook.runtime.secret import QUOTE, Secret, check_identity, read_secret, read_user, split_url, with_password

READ_LEVELS: Final = ("ONE", "TWO", "THREE", "QUORUM", "ALL", "LOCAL_QUORUM", "LOCAL_ONE")
WRITE_LEVELS: Final = (*READ_LEVELS, "EACH_QUORUM")
SERIAL_LEVELS: Final = ("SERIAL", "LOCAL_SERIAL")

_COUNTS: Final = {"ONE": 1, "TWO": 2, "THREE": 3, "LOCAL_ONE": 1}


def replicas_of(replication: Mapping[str, str]) -> dict[str, int]:
    """Return the number of replicas in each data centre, from a keyspace's `replication`.

    A SimpleStrategy counts as one data centre.

    >>> replicas_of({"class": "org.apache.cassandra.locator.NetworkTopologyStrategy", "dc1": "3", "dc2": "2"})
    {'dc1': 3, 'dc2': 2}
    """
    # The count may be "3/1": the transient replicas after the slash hold no data permanently.
    counts = {name: int(count.split("/")[0]) for name, count in replication.items() if name != "class"}
    return {"": counts["replication_factor"]} if "replication_factor" in counts else counts


def reads_see_writes(read: str, write: str, replicas: Mapping[str, int], local_dc: str | None = None) -> bool:
    """Return whether every read at one level overlaps with every acknowledged write at the other: R + W > RF.

    Local levels are evaluated within one data centre, where readers and the pipeline must both run. `local_dc` names
    it; without it the condition must hold in every data centre.

    >>> reads_see_writes("LOCAL_QUORUM", "LOCAL_QUORUM", {"dc1": 3})
    True
    >>> reads_see_writes("LOCAL_ONE", "LOCAL_QUORUM", {"dc1": 3})
    False
    """
    total = sum(replicas.values())
    if not _is_local(read):
        missed = max(_missed_anywhere(write, replicas, dc) for dc in _local_centres(replicas, local_dc))
        return _count(read, total) > missed
    return all(
        _count(read, replicas[dc]) > _missed_within(write, replicas, dc)
        for dc in _local_centres(replicas, local_dc)
        if replicas[dc]
    )


def _local_centres(replicas: Mapping[str, int], local_dc: str | None) -> list[str]:
    return [local_dc] if local_dc is not None and local_dc in replicas else list(replicas)


def _missed_anywhere(write: str, replicas: Mapping[str, int], dc: str) -> int:
    """Return how many replicas in total may lack an acknowledged write."""
    total = sum(replicas.values())
    if write == "EACH_QUORUM":
        return sum(count - _quorum(count) for count in replicas.values())
    return total - (_count(write, replicas[dc]) if _is_local(write) else _count(write, total))


def _missed_within(write: str, replicas: Mapping[str, int], dc: str) -> int:
    """Return how many replicas of one data centre may lack an acknowledged write."""
    here, total = replicas[dc], sum(replicas.values())
    if write == "EACH_QUORUM":
        return here - _quorum(here)
    if _is_local(write):
        return here - _count(write, here)
    return min(here, total - _count(write, total))


def _is_local(level: str) -> bool:
    return level.startswith("LOCAL_")


def _quorum(replicas: int) -> int:
    return replicas // 2 + 1


def _count(level: str, replicas: int) -> int:
    if level.endswith("QUORUM"):
        return _quorum(replicas)
    return replicas if level == "ALL" else min(_COUNTS[level], replicas)


PORT = 9042
PASSWORD_VARIABLE = "TIDEBOOK_STORE_PASSWORD"
_KEYSPACE = re.compile(r"[a-z][a-z0-9_]{0,47}")
_DC = re.compile(r"[A-Za-z0-9_. -]{1,100}")


class CassandraSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[store]` section of `tidebook.toml`, with `url = "cassandra://host:9042/keyspace"`.

    >>> CassandraSettings.read("cassandra://one,two/books", {"user": "me", "password": "secret"})
    CassandraSettings(hosts=('one', 'two'), port=9042, keyspace='books', user='me', tls=False)
    """

    #: The nodes to contact first, from the URL.
    hosts: tuple[str, ...]
    #: The port of all nodes, from the URL.
    port: int = PORT
    #: The keyspace, from the URL.
    keyspace: str
    #: The user; without one, connections are not authenticated.
    user: str | None = None
    #: The user's password; it may also be in TIDEBOOK_STORE_PASSWORD.
    password: Secret | None = None
    #: Read once, when the store is opened.
    password_file: str | None = None
    #: Whether connections use TLS.
    tls: bool = False
    #: A PEM file with the certificates of trusted authorities.
    ca_file: str | None = None
    #: A PEM file with a client certificate, if the cluster requires one.
    cert_file: str | None = None
    #: A PEM file with the key of the client certificate.
    key_file: str | None = None
    #: The checks of a node's certificate: only its signature, or also its address or its name.
    verify: Literal["certificate", "address", "name"] = "address"
    #: The data centre to read and write in; by default that of the first host that answers.
    local_dc: str | None = None
    #: Create the keyspace if it is missing.
    create_keyspace: bool = True
    #: The replicas of a keyspace that is created: a number, or a table of data centre → replicas.
    replication: int | dict[str, int] | None = None
    #: The consistency level of reads and writes.
    consistency: str = "LOCAL_QUORUM"
    #: The level of reads only.
    read_consistency: str | None = None
    #: The level of writes only.
    write_consistency: str | None = None
    #: The level of compare-and-sets; LOCAL_SERIAL suffices if all processes of the book are in one data centre.
    serial_consistency: str = "SERIAL"
    #: The timeout of a connection.
    connect_timeout_s: float = 3.0
    #: The timeout of one attempt to read.
    read_timeout_s: float = 3.0
    #: The timeout of one attempt to write.
    write_timeout_s: float = 5.0
    #: How long an unacknowledged write of a slice is retried before the slice fails.
    write_deadline_s: float = 30.0
    #: The maximum number of batches in flight; that of single rows is twice as high.
    in_flight_max: int = 128
    #: How many partitions of a table one small request may touch; with 1, every request goes to the replicas of its
    #: partition.
    partitions_together_max: int = 10
    #: Tag rows of one tag and bucket per batch; batches are bounded in bytes too.
    max_message_batch_size: int = 100

    @classmethod
    def read(
        cls, url: str, options: Mapping[str, Any] | None = None, *, environment: Mapping[str, str] | None = None
    ) -> CassandraSettings:
        """Return settings from a URL and the options of the section; the password may come from the environment."""
        given = {**_url_options(url), **(options or {})}
        given = with_password(given, PASSWORD_VARIABLE, os.environ if environment is None else environment)
        try:
            return msgspec.convert(given, cls, dec_hook=read_secret)
        except msgspec.ValidationError as error:
            raise InvalidInput(f"[store] for Cassandra: {error}") from error

    def __post_init__(self) -> None:
        if not self.hosts or not all(self.hosts):
            raise InvalidInput("a Cassandra URL needs at least one host: cassandra://host:9042/keyspace")
        if not _KEYSPACE.fullmatch(self.keyspace):
            # The keyspace is not shown: it may be a part of a password.
            raise InvalidInput(f"a keyspace name has up to 48 characters a-z, 0-9, _ and begins with a letter{QUOTE}")
        for name, level, levels in (
            ("consistency", self.consistency, READ_LEVELS),
            ("read_consistency", self.reading, READ_LEVELS),
            ("write_consistency", self.writing, WRITE_LEVELS),
            ("serial_consistency", self.serial_consistency, SERIAL_LEVELS),
        ):
            if level not in levels:
                raise InvalidInput(f"{name} must be one of {', '.join(levels)}, not {level!r}")
        if self.max_message_batch_size < 1:
            raise InvalidInput(f"max_message_batch_size must be at least 1, not {self.max_message_batch_size}")
        if self.partitions_together_max < 1:
            raise InvalidInput(f"partitions_together_max must be at least 1, not {self.partitions_together_max}")
        if isinstance(self.replication, dict) and not all(_DC.fullmatch(dc) for dc in self.replication):
            raise InvalidInput("replication contains an invalid name of a data centre")
        if not self.tls and (self.ca_file or self.cert_file or self.key_file):
            raise InvalidInput("certificates are given but tls is off: set tls = true")
        check_identity(self.password, self.password_file, self.cert_file, self.key_file)

    @property
    def reading(self) -> str:
        return self.read_consistency or self.consistency

    @property
    def writing(self) -> str:
        return self.write_consistency or self.consistency

    def secret(self) -> str | None:
        """Return the password, from the settings or from the password file."""
        if self.password is not None or self.password_file is None:
            return None if self.password is None else self.password.reveal()
        return _read_file(self.password_file, "password_file").rstrip("\r\n")

    def certificate(self, name: Literal["ca_file", "cert_file", "key_file"]) -> str | None:
        """Return the text of a PEM file."""
        file = getattr(self, name)
        return None if file is None else _read_file(file, name)

    def __repr__(self) -> str:
        address = f"hosts={self.hosts!r}, port={self.port!r}, keyspace={self.keyspace!r}"
        return f"CassandraSettings({address}, user={self.user!r}, tls={self.tls!r})"


def _url_options(url: str) -> dict[str, Any]:
    parts = split_url(url, "the URL of a Cassandra store")
    if parts.scheme != "cassandra":
        raise InvalidInput("the URL of a Cassandra store has the form cassandra://host:9042/keyspace")
    if parts.query or parts.fragment:
        raise InvalidInput(f"a Cassandra URL has no query part: set the options in [store]{QUOTE}")
    user_info, _, address = parts.netloc.rpartition("@")
    hosts, _, port = address.partition(":")
    given: dict[str, Any] = {"hosts": tuple(host.strip() for host in hosts.split(","))}
    given["keyspace"] = parts.path.strip("/")
    if port:
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise InvalidInput(f"one port is given for all hosts: cassandra://one,two:9042/keyspace{QUOTE}")
        given["port"] = int(port)
    return given | read_user(user_info)


def _read_file(file: str, option: str) -> str:
    try:
        return Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{option} {file} cannot be read: {type(error).__name__}") from error
