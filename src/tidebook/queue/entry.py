"""Entries to be put into a queue: validate and encode them, and identify them by the hash of their key."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from hashlib import blake2b
from typing import Any, Final

import msgspec

from tidebook.core.errors import InvalidInput, TooLarge
from tidebook.core.payload import encode_payload, encode_text
from tidebook.queue.port import (
    ENTRIES_MAX,
    LEASE_MS_MAX,
    NEVER_MS,
    PRIORITY_MAX,
    PUT_BYTES_MAX,
    NewEntry,
    Step,
    WorkerReport,
)
from tidebook.queue.priority import DEFAULT
from tidebook.runtime.clock import Ids
from tidebook.runtime.tracing import valid_context

KEY_BYTES_MAX: Final = 1_000
DATA_BYTES_MAX: Final = 1_000_000
#: The last millisecond of the year 9999, the latest that a datetime can hold.
DATE_MS_MAX: Final = 253_402_300_799_999
#: The maximum size of the name of a source, which may contain ids of journals, and of the place of a mark.
SOURCE_BYTES_MAX: Final = 1_000
PLACE_BYTES_MAX: Final = 32_000
PART_MAX: Final = 2**31 - 1

Date = datetime | int | None


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `put_many`; the fields are the arguments of `put`."""

    data: Any
    key: str | None = None
    priority: int = DEFAULT
    process_at: Date = None
    expires_at: Date = None
    #: The trace that its processing continues, as `traceparent` of W3C; by default that of the put.
    traceparent: str | None = None


def encode_data(data: Any) -> tuple[int, bytes]:
    """Return the kind and bytes of user data; raise TooLarge if there are too many bytes."""
    kind, encoded = encode_payload(data)
    if len(encoded) > DATA_BYTES_MAX:
        raise TooLarge("an entry's data", size_bytes=len(encoded), limit_bytes=DATA_BYTES_MAX)
    return kind, encoded


def new_entry(entry: Entry, data: Any, ids: Ids) -> NewEntry:
    """Return the checked and encoded entry; `data` is its data after the check against the declared fields.

    An entry without a key gets a unique hash, so that it is never merged.
    """
    priority = entry.priority
    if type(priority) is not int or not 0 <= priority <= PRIORITY_MAX:
        raise InvalidInput(f"a priority must be a number from 0 (first) to {PRIORITY_MAX} (last), not {priority!r}")
    kind, encoded = encode_data(data)
    process_at = None if entry.process_at is None else milliseconds(entry.process_at, "process_at")
    expires_at = NEVER_MS if entry.expires_at is None else milliseconds(entry.expires_at, "expires_at")
    trace = entry.traceparent
    if trace is not None and valid_context(trace) is None:
        raise InvalidInput(f"traceparent must be a W3C trace context such as 00-…-…-01, not {trace!r:.80}")
    if entry.key is None:
        return NewEntry(ids.new(), kind, encoded, None, priority, process_at, expires_at, trace)
    return NewEntry(hash_key(entry.key), kind, encoded, entry.key, priority, process_at, expires_at, trace)


def with_trace(entries: list[NewEntry], carried: str | None) -> list[NewEntry]:
    """Return the entries with the trace context of their put; an entry that already has one keeps it."""
    if carried is None:
        return entries
    return [each if each.trace is not None else msgspec.structs.replace(each, trace=carried) for each in entries]


def merge_same_keys(entries: Iterable[NewEntry]) -> list[NewEntry]:
    """Merge entries of one call that have the same key, by the rule that merges a put into a waiting entry."""
    by_hash: dict[bytes, NewEntry] = {}
    for new in entries:
        old = by_hash.get(new.keyhash)
        by_hash[new.keyhash] = new if old is None else _merge(old, new)
    return list(by_hash.values())


def chunks(entries: list[NewEntry]) -> Iterator[list[NewEntry]]:
    """Split entries into lists that each fit into one transaction."""
    begin = size_bytes = 0
    for index, entry in enumerate(entries):
        size_bytes += len(entry.data)
        if index - begin == ENTRIES_MAX or (size_bytes > PUT_BYTES_MAX and index > begin):
            yield entries[begin:index]
            begin, size_bytes = index, len(entry.data)
    if entries:
        yield entries[begin:]


def _merge(old: NewEntry, new: NewEntry) -> NewEntry:
    # None means now, which is before any future date; a past date is treated as now.
    dates = [date for date in (old.process_at, new.process_at) if date is not None]
    return msgspec.structs.replace(
        new,
        priority=min(old.priority, new.priority),
        process_at=max(dates, default=None),
        expires_at=max(old.expires_at, new.expires_at),
    )


def milliseconds(date: datetime | int, name: str) -> int:
    """Return a date as milliseconds since 1970; raise InvalidInput for a datetime without a time zone."""
    if isinstance(date, datetime):
        if date.tzinfo is None:
            raise InvalidInput(f"{name}: {date!r} has no time zone: add one, as datetime.now(UTC) does")
        try:
            value = round(date.timestamp() * 1000)
        except (OverflowError, OSError, ValueError) as error:
            raise InvalidInput(f"{name}: {date!r} is out of range") from error
    elif type(date) is int:
        value = date
    else:
        raise InvalidInput(f"{name} must be a datetime, or milliseconds since 1970, not {type(date).__name__}")
    if not 0 <= value <= DATE_MS_MAX:
        shown = date.isoformat() if isinstance(date, datetime) else date
        raise InvalidInput(f"{name} must be between 1970 and 9999, not {shown}")
    return value


def duration_ms(value: timedelta | float, name: str, *, least_ms: int = 0) -> int:
    """Return a timedelta, or a number of seconds, as milliseconds."""
    if isinstance(value, timedelta):
        ms = round(value.total_seconds() * 1000)
    elif type(value) in (int, float) and math.isfinite(value):
        ms = round(value * 1000)
    else:
        raise InvalidInput(f"{name} must be a timedelta, or a number of seconds, not {value!r}")
    if not least_ms <= ms <= LEASE_MS_MAX:
        raise InvalidInput(f"{name} must be {least_ms} ms to a hundred years, not {value!r}")
    return ms


def hash_key(key: object) -> bytes:
    """Return the hash that identifies a key; raise InvalidInput if it is not a valid key."""
    if type(key) is not str:
        raise InvalidInput(f"a key must be a string, not {type(key).__name__}")
    if not key or "\x00" in key:
        raise InvalidInput("a key must not be empty, nor contain NUL")
    try:
        encoded = key.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"a key must be valid Unicode text: {error}") from error
    if len(encoded) > KEY_BYTES_MAX:
        raise InvalidInput(f"a key may have at most {KEY_BYTES_MAX} bytes, not {len(encoded)}")
    return blake2b(encoded, digest_size=16).digest()


def check_source_name(value: object) -> str:
    """Return the name of a source; raise InvalidInput if it is not one."""
    return _check_text(value, "a source's name", SOURCE_BYTES_MAX)


def check_worker(report: WorkerReport) -> WorkerReport:
    """Return a worker's report; raise InvalidInput if it is malformed."""
    if type(report.id) is not bytes or len(report.id) != 16:
        raise InvalidInput("a worker's id must be 16 bytes")
    _check_text(report.name, "a worker's name", KEY_BYTES_MAX)
    for number in (report.concurrency, report.running, report.done, report.failed):
        if type(number) is not int or not 0 <= number < 2**31:
            raise InvalidInput(f"the numbers of a worker must be 0 to {2**31 - 1:,}, not {number!r}")
    return report


def check_steps(steps: Iterable[Step]) -> Sequence[Step]:
    """Return the steps of a put; raise InvalidInput if one is malformed or a part of the source moves twice."""
    given: object = steps
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Step):
        raise InvalidInput(f"steps must be a list of Step, not {type(given).__name__}")
    checked = list(given)
    for step in checked:
        if not isinstance(step, Step):
            raise InvalidInput(f"steps must be a list of Step: {step!r} is not a Step")
        if type(step.part) is not int or not 0 <= step.part <= PART_MAX:
            raise InvalidInput(f"a step's part must be a number from 0 to {PART_MAX}, not {step.part!r}")
        if step.before is not None:
            _check_text(step.before, "the place before a step", PLACE_BYTES_MAX)
        _check_text(step.after, "the place after a step", PLACE_BYTES_MAX)
    if len({step.part for step in checked}) < len(checked):
        raise InvalidInput("two steps name the same part of the source: one put moves it once")
    return checked


def _check_text(value: object, what: str, bytes_max: int) -> str:
    if type(value) is not str or not value or "\x00" in value:
        raise InvalidInput(f"{what} must be non-empty text without NUL, not {value!r:.60}")
    size_bytes = len(encode_text(value, what))
    if size_bytes > bytes_max:
        raise InvalidInput(f"{what} may have at most {bytes_max:,} bytes, not {size_bytes:,}")
    return value
