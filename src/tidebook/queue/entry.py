"""Entries on their way in, checked and with their key's hash."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from hashlib import blake2b
from typing import Any, Final

import msgspec

from tidebook.core.clock import Ids
from tidebook.core.errors import InvalidInput, TooLarge
from tidebook.core.payload import encode_payload
from tidebook.queue.priority import DEFAULT
from tidebook.sql.port.queue import ENTRIES_MAX, LEASE_MS_MAX, NEVER_MS, PRIORITY_MAX, PUT_BYTES_MAX, NewEntry

KEY_BYTES_MAX: Final = 1_000
DATA_BYTES_MAX: Final = 1_000_000
#: The last date that is still one, year 9999.
DATE_MS_MAX: Final = 253_402_300_799_999

Date = datetime | int | None


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `put_many`; the names are those of `put`."""

    data: Any
    key: str | None = None
    priority: int = DEFAULT
    process_at: Date = None
    expires_at: Date = None


def key_hash(key: str) -> bytes:
    """128 bits that stand for a key in the index."""
    return blake2b(key.encode(), digest_size=16).digest()


def encoded_data(data: Any) -> tuple[int, bytes]:
    """User data as it is kept, its type and bytes."""
    kind, encoded = encode_payload(data)
    if len(encoded) > DATA_BYTES_MAX:
        raise TooLarge("an entry's data", size_bytes=len(encoded), limit_bytes=DATA_BYTES_MAX)
    return kind, encoded


def new_entry(entry: Entry, data: Any, ids: Ids) -> NewEntry:
    """Check an entry, whose data was checked against the declaration; without a key it gets a hash of its own."""
    priority = entry.priority
    if type(priority) is not int or not 0 <= priority <= PRIORITY_MAX:
        raise InvalidInput(f"a priority is a number from 0 (first) to {PRIORITY_MAX} (last), not {priority!r}")
    kind, encoded = encoded_data(data)
    process_at = None if entry.process_at is None else milliseconds(entry.process_at, "process_at")
    expires_at = NEVER_MS if entry.expires_at is None else milliseconds(entry.expires_at, "expires_at")
    if entry.key is None:
        return NewEntry(ids.new(), kind, encoded, None, priority, process_at, expires_at)
    return NewEntry(_checked_key(entry.key), kind, encoded, entry.key, priority, process_at, expires_at)


def merged(entries: Iterable[NewEntry]) -> list[NewEntry]:
    """Entries of one call with the same key become one, by the rule by which a put merges into a waiting one."""
    by_hash: dict[bytes, NewEntry] = {}
    for new in entries:
        old = by_hash.get(new.keyhash)
        by_hash[new.keyhash] = new if old is None else _merge(old, new)
    return list(by_hash.values())


def chunks(entries: list[NewEntry]) -> Iterator[list[NewEntry]]:
    """Entries in as many lists as it takes for each to go into one transaction."""
    if len(entries) * DATA_BYTES_MAX <= PUT_BYTES_MAX:
        yield from [entries] if entries else []
        return
    begin = size_bytes = 0
    for place, entry in enumerate(entries):
        size_bytes += len(entry.data)
        if place - begin == ENTRIES_MAX or (size_bytes > PUT_BYTES_MAX and place > begin):
            yield entries[begin:place]
            begin, size_bytes = place, len(entry.data)
    yield entries[begin:]


def _merge(old: NewEntry, new: NewEntry) -> NewEntry:
    # None is now, which is before any date that is not past; a past one counts as now.
    dates = [date for date in (old.process_at, new.process_at) if date is not None]
    return NewEntry(
        new.keyhash,
        new.kind,
        new.data,
        new.key,
        min(old.priority, new.priority),
        max(dates) if dates else None,
        max(old.expires_at, new.expires_at),
    )


def milliseconds(date: datetime | int, name: str) -> int:
    """A date as milliseconds since 1970; a datetime without a zone is in local time, as everywhere in Python."""
    if isinstance(date, datetime):
        try:
            value = round(date.timestamp() * 1000)
        except (OverflowError, OSError, ValueError) as error:
            raise InvalidInput(f"{name}: {date!r} is out of range") from error
    elif type(date) is int:
        value = date
    else:
        raise InvalidInput(f"{name} is a datetime, or milliseconds since 1970, not {type(date).__name__}")
    if not 0 <= value <= DATE_MS_MAX:
        raise InvalidInput(f"{name} must lie between 1970 and 9999: {date!r} does not")
    return value


def duration_ms(value: timedelta | float, name: str, *, least_ms: int = 0) -> int:
    """A timedelta, or seconds, as milliseconds."""
    if isinstance(value, timedelta):
        ms = round(value.total_seconds() * 1000)
    elif type(value) in (int, float) and math.isfinite(value):
        ms = round(value * 1000)
    else:
        raise InvalidInput(f"{name} is a timedelta, or a number of seconds, not {value!r}")
    if not least_ms <= ms <= LEASE_MS_MAX:
        raise InvalidInput(f"{name} must be {least_ms} ms to a hundred years, not {value!r}")
    return ms


def _checked_key(key: object) -> bytes:
    if type(key) is not str:
        raise InvalidInput(f"a key is text, not {type(key).__name__}")
    if not key or "\x00" in key:
        raise InvalidInput("a key must not be empty, nor contain NUL")
    try:
        encoded = key.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"a key must be valid Unicode text: {error}") from error
    if len(encoded) > KEY_BYTES_MAX:
        raise InvalidInput(f"a key may take {KEY_BYTES_MAX} bytes, this one takes {len(encoded)}")
    return blake2b(encoded, digest_size=16).digest()
