"""The key of a journal: its topic and its id within the topic."""

from __future__ import annotations

import re
from typing import NamedTuple
from zlib import crc32

from tidebook.core.errors import InvalidInput
from tidebook.core.position import Partition

TOPIC_LENGTH_MAX = 200
ID_BYTES_MAX = 1000

_TOPIC = re.compile(rf"[A-Za-z0-9._-]{{1,{TOPIC_LENGTH_MAX}}}")


class Key(NamedTuple):
    """The key of a journal. All records of a journal are in one partition of its topic."""

    topic: str
    id: str

    def __str__(self) -> str:
        return f"{self.topic}/{self.id}"


def topic_name(value: object) -> str:
    """Return `value` if it is a valid topic name; raise InvalidInput otherwise.

    A topic consists of the letters, digits and `. _ -` that every log accepts.

    >>> topic_name("orders")
    'orders'
    """
    if type(value) is not str:
        raise InvalidInput(f"a topic must be a string, not {type(value).__name__}")
    if not _TOPIC.fullmatch(value) or value in {".", ".."}:
        raise InvalidInput(
            f"topic {value[:80]!r} must have 1 to {TOPIC_LENGTH_MAX} characters of A-Z a-z 0-9 . _ - (not '.', '..')"
        )
    return value


def journal_id(value: object) -> str:
    """Return `value` if it is a valid id: text that is not empty, without NUL and of at most ID_BYTES_MAX bytes.

    Raise InvalidInput otherwise.
    """
    if type(value) is not str:
        raise InvalidInput(f"a journal's id must be a string, not {type(value).__name__}")
    if not value:
        raise InvalidInput("a journal's id must not be empty")
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError as error:
        raise InvalidInput(f"a journal's id must be valid Unicode text: {error}") from error
    if size > ID_BYTES_MAX:
        raise InvalidInput(f"a journal's id must not exceed {ID_BYTES_MAX} bytes, and this one has {size}")
    if "\x00" in value:
        raise InvalidInput("a journal's id must not contain NUL")
    return value


def partition_of(id: str, partitions: int) -> Partition:
    """Return the partition of a journal: the CRC-32 of the id's UTF-8 bytes, modulo the topic's partition count.

    This is librdkafka's `consistent` partitioner. It must never change, nor may the partition count of a topic.
    """
    return Partition(crc32(id.encode()) % partitions)


def home_of(record_key: bytes | None, partitions: int) -> tuple[str, Partition] | tuple[None, None]:
    """Return the id and the partition of the journal that a record key names, or None for both if it names none.

    A mark has no key. Any client may write to a log, so a key need not be a valid id, and a record may be in a
    partition other than its journal's: replication parks such records, and readers skip them.

    >>> home_of(b"o-1", 4), home_of(None, 4), home_of(b"", 4)
    (('o-1', 2), (None, None), (None, None))
    """
    try:
        id = None if record_key is None else journal_id(record_key.decode())
    except (UnicodeDecodeError, InvalidInput):
        id = None
    return (None, None) if id is None else (id, partition_of(id, partitions))


def journal_of(record_key: bytes | None, partition: int, partitions: int) -> str | None:
    """Return the id of the journal that a record in this partition belongs to, or None if it belongs to none."""
    id, home = home_of(record_key, partitions)
    return id if home == partition else None
