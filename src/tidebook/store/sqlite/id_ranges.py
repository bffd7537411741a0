"""Full scans of a topic, split by ranges of journal ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import Any, Final

from tidebook.core.errors import Corrupt
from tidebook.core.event import event_tags
from tidebook.core.head import Head, decode_head
from tidebook.core.key import ID_BYTES_MAX
from tidebook.core.position import Position
from tidebook.core.repair import Damage
from tidebook.core.replication_plan import EventRow, TagRow
from tidebook.sqlite.database import Database
from tidebook.store.port import ScanSplit

PAGE_ROWS: Final = 5_000
PAGE_BYTES_MAX: Final = 8_000_000
STEP_ROWS: Final = 50
#: A string after every id: the last character of Unicode, more often than an id has room for.
_AFTER_ALL_IDS: Final = "\U0010ffff" * (ID_BYTES_MAX // 4 + 1)

_IDS = """SELECT id FROM (SELECT id, row_number() OVER (ORDER BY id) AS n FROM metajournal WHERE topic = ?)
    WHERE n % ? = 0 ORDER BY id"""
_HEADS = "SELECT id, head FROM metajournal WHERE topic = ? AND id > ? AND id <= ? ORDER BY id LIMIT ?"
_EVENTS = """SELECT id, seq_nr, kept, time_ms, epoch, "offset", "index", log_ms FROM journal
    WHERE topic = ? AND (id, seq_nr) > (?, ?) AND id <= ? ORDER BY id, seq_nr LIMIT ?"""


def inspect_heads(database: Database, topic: str, split: ScanSplit) -> Iterator[Sequence[tuple[str, Head | Damage]]]:
    """Yield pages of the heads in a range; a head that cannot be decoded is returned as Damage."""
    low = split.low
    while True:
        with database.reading() as connection:
            page: list[Any] = connection.execute(_HEADS, (topic, low, split.high, PAGE_ROWS)).fetchall()
        if not page:
            return
        yield [(id, _head_or_damage(topic, id, data)) for id, data in page]
        low = page[-1][0]


def _head_or_damage(topic: str, id: str, data: Any) -> Head | Damage:
    try:
        return decode_head(data)
    except (Corrupt, TypeError) as error:
        return Damage("head", topic, id, str(error))


def event_or_damage(topic: str, id: str, row: EventRow) -> EventRow | Damage:
    """Return the row, or Damage if its event cannot be decoded or a column has a wrong type, which SQLite permits."""
    encoded: object = row.kept
    numbers = (row.timestamp_ms, row.position.epoch, row.position.offset, row.index, row.time_ms)
    if not isinstance(encoded, bytes) or not all(isinstance(each, int) for each in numbers):
        return Damage("event", topic, id, "a column of the event has the wrong type", seq_nr=row.seq_nr)
    try:
        event_tags(encoded)
    except Corrupt as error:
        return Damage("event", topic, id, str(error), seq_nr=row.seq_nr)
    return row


def tag_row_or_damage(row: TagRow) -> TagRow | Damage:
    """Return the row, or Damage if a column has a wrong type."""
    encoded: object = row.kept
    id: object = row.id
    numbers = (row.life_epoch, row.life_offset, row.tag_seq_nr, row.seq_nr, row.timestamp_ms)
    if isinstance(encoded, bytes) and isinstance(id, str) and all(isinstance(each, int) for each in numbers):
        return row
    return Damage("tag", row.topic, None, "a column of the tag row has the wrong type", place=row.place)


def id_splits(database: Database, topic: str, count: int) -> list[ScanSplit]:
    """Return at most `count` ranges of ids, low < id ≤ high, with about the same number of heads each."""
    with database.reading() as connection:
        heads: Any = connection.execute("SELECT count(*) FROM metajournal WHERE topic = ?", (topic,)).get
        step = -(-heads // max(count, 1)) or 1
        rows: list[Any] = connection.execute(_IDS, (topic, step)).fetchall()
    inner_borders = [id for (id,) in rows]
    borders = ["", *inner_borders[: count - 1], _AFTER_ALL_IDS]
    return [ScanSplit(low, high) for low, high in pairwise(borders)]


def heads_in(database: Database, topic: str, split: ScanSplit) -> Iterator[Sequence[tuple[str, Head]]]:
    """Yield pages of the heads in a range."""
    low = split.low
    while True:
        with database.reading() as connection:
            page: list[Any] = connection.execute(_HEADS, (topic, low, split.high, PAGE_ROWS)).fetchall()
        if not page:
            return
        yield [(id, decode_head(head)) for id, head in page]
        low = page[-1][0]


def events_in(database: Database, topic: str, split: ScanSplit) -> Iterator[Sequence[tuple[str, EventRow]]]:
    """Yield pages of the event rows in a range, of about PAGE_BYTES_MAX at most."""
    low: tuple[str, int] = (split.low, 2**63 - 1)
    while True:
        page: list[tuple[str, EventRow]] = []
        size_bytes = 0
        with database.reading() as connection:
            rows: Any = connection.execute(_EVENTS, (topic, *low, split.high, PAGE_ROWS))
            # Fetch in steps, at half the cost of single rows. Steps are short, since their size is not known before.
            while size_bytes <= PAGE_BYTES_MAX and (step := list(islice(rows, STEP_ROWS))):
                page += [
                    (id, EventRow(seq_nr, encoded, time_ms, Position(epoch, offset), index, log_ms))
                    for id, seq_nr, encoded, time_ms, epoch, offset, index, log_ms in step
                ]
                size_bytes += sum([len(row[2]) for row in step])
            rows.close()
        if not page:
            return
        yield page
        low = (page[-1][0], page[-1][1].seq_nr)
