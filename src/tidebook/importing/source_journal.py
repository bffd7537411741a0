"""A journal of kafka-journal: its head and its events, read from rows of Cassandra and converted for a book."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, datetime, timedelta
from typing import Any

import msgspec

from tidebook.core.errors import Corrupt
from tidebook.core.event import Event
from tidebook.core.payload import decode_json

#: The key in an imported event's metadata under which the fields are stored that only kafka-journal has.
METADATA_NAME = "kafka_journal"

#: The columns of each table. Older versions of kafka-journal have created their tables without the optional ones.
HEAD_COLUMNS = ("topic", "id", "segment_size", "seq_nr", "delete_to", "expire_after", "expire_on", "record_id")
EVENT_COLUMNS = (
    "seq_nr", "partition", "offset", "timestamp", "origin", "version", "meta_record_id", "tags", "payload_type",
    "payload_txt", "payload_bin", "metadata", "headers",
)  # fmt: skip
OPTIONAL_COLUMNS = frozenset(
    {"expire_after", "expire_on", "record_id", "origin", "version", "meta_record_id", "headers", "metadata"}
)
#: A month has no fixed length; kafka-journal itself writes days and nanoseconds only.
_UNITS_S = {
    "y": 365 * 86_400.0, "mo": 30 * 86_400.0, "w": 7 * 86_400.0, "d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0,
    "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9,
}  # fmt: skip
_PART = re.compile(r"(\d+)(mo|ms|us|µs|ns|y|w|d|h|m|s)")


def parse_duration(text: str) -> timedelta:
    """Return the length of a CQL duration; a month counts as 30 days, and a year as 365.

    >>> parse_duration("1d2h")
    datetime.timedelta(days=1, seconds=7200)
    """
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise Corrupt(f"{text[:40]!r} is not a duration such as 1d2h")
    return timedelta(seconds=sum(int(number) * _UNITS_S[unit] for number, unit in parts))


class SourceHead(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `metajournal`."""

    topic: str
    id: str
    segment_size: int
    #: The last number, at least `delete_to`; deleting a journal that does not exist raises only `delete_to` in the row.
    seq_nr: int
    #: 0 if nothing was deleted.
    delete_to: int = 0
    expire_after: timedelta | None = None
    expire_on: date | None = None
    record_id: str | None = None

    def has_expired(self, today: date) -> bool:
        """Return whether kafka-journal would purge the journal today."""
        return self.expire_on is not None and self.expire_on <= today

    def segments(self) -> range:
        """Return the segments of `journal` that may hold events; a gap in the numbers may leave some of them empty."""
        return range(self.delete_to // self.segment_size, (self.seq_nr - 1) // self.segment_size + 1)


class SourceEvent(msgspec.Struct, frozen=True):
    """A row of `journal`, as an event of a book."""

    seq_nr: int
    #: The Kafka record that held it. The events of one append share it.
    partition: int
    offset: int
    event: Event


def read_head(row: Mapping[str, Any]) -> SourceHead:
    """Return the head in a row of `metajournal`; raise Corrupt if a required column is empty."""
    for name in ("segment_size", "seq_nr"):
        if not isinstance(row.get(name), int) or row[name] < 1:
            raise Corrupt(f"{row['topic']}/{row['id']}: metajournal.{name} is {row.get(name)!r}")
    delete_to = row.get("delete_to") or 0
    expire_after = row.get("expire_after")
    return SourceHead(
        topic=row["topic"],
        id=row["id"],
        segment_size=row["segment_size"],
        seq_nr=max(row["seq_nr"], delete_to),
        delete_to=delete_to,
        expire_after=None if expire_after is None else parse_duration(expire_after),
        expire_on=row.get("expire_on"),
        record_id=row.get("record_id"),
    )


def belongs_to(row: Mapping[str, Any], head: SourceHead) -> bool:
    """Return whether a row of `journal` is of the head's incarnation; a purge may have left rows of an earlier one."""
    row_id = row.get("meta_record_id")
    return head.record_id is None or row_id is None or row_id == head.record_id


def read_event(row: Mapping[str, Any]) -> SourceEvent:
    """Return the event in a row of `journal`; raise Corrupt if its payload does not fit its type."""
    seq_nr, timestamp = row["seq_nr"], row["timestamp"]
    known: dict[str, Any] = {"partition": row["partition"], "offset": row["offset"]}
    if isinstance(timestamp, datetime):
        known["timestamp"] = timestamp.isoformat(timespec="milliseconds")
    for name in ("origin", "version", "headers"):
        if row.get(name):
            known[name] = row[name]
    if row.get("metadata"):
        known["metadata"] = _json(row["metadata"], f"the metadata of event {seq_nr}")
    payload = _payload(row)
    return SourceEvent(
        seq_nr,
        row["partition"],
        row["offset"],
        Event(payload, tags=row.get("tags") or (), metadata={METADATA_NAME: known}),
    )


def _payload(row: Mapping[str, Any]) -> Any:
    """Return the payload: JSON, text or bytes by `payload_type`, and None for an event without one."""
    kind, text, data = row["payload_type"], row["payload_txt"], row["payload_bin"]
    match kind:
        case None:
            return None
        case "json" | "text" if text is None and data is None:
            raise Corrupt(f"event {row['seq_nr']} is of type {kind} and has no payload")
        case "json":
            return _json(data.decode() if text is None else text, f"the payload of event {row['seq_nr']}")
        case "text":
            return data.decode() if text is None else text
        case "binary":
            return b"" if data is None else data
        case _:
            raise Corrupt(f"event {row['seq_nr']} has the unknown payload type {kind!r}")


def _json(text: str, what: str) -> Any:
    try:
        return decode_json(text.encode())
    except ValueError as error:
        raise Corrupt(f"{what} is not JSON: {error}") from error
