"""The store in a SQLite file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice, pairwise, starmap, takewhile
from pathlib import Path
from typing import Any, Final

import apsw
from msgspec.structs import astuple

from tidebook.core.errors import Corrupt
from tidebook.core.event import event_tags
from tidebook.core.head import Head, decode_head, encode_head
from tidebook.core.key import ID_BYTES_MAX, Key
from tidebook.core.position import Position
from tidebook.core.repair import Damage, Repair
from tidebook.core.replication_plan import (
    EventRow,
    Parked,
    Pointer,
    SliceWrites,
    TagPosition,
    TagRow,
    TopicPosition,
    TopicRow,
)
from tidebook.core.topic_config import TopicConfig
from tidebook.runtime.metrics import Metrics
from tidebook.sqlite.shared_files import SqliteAdapter
from tidebook.store.port import ScanSplit, StoredSnapshot
from tidebook.store.sqlite import writes as operations
from tidebook.store.sqlite.tables import FILE, SCHEMA

PAGE_MAX: Final = 1_000
SCAN_PAGE_MAX: Final = 5_000
PAGE_BYTES_MAX: Final = 8_000_000
#: How many rows are fetched before their size is checked.
STEP_ROWS: Final = 50
#: A string that sorts after every id: the last character of Unicode, repeated to more than the length of an id.
_AFTER_ALL_IDS: Final = "\U0010ffff" * (ID_BYTES_MAX // 4 + 1)

_EVENT = 'seq_nr, encoded, time_ms, epoch, "offset", "index", log_ms FROM journal'
_EVENTS = f"SELECT {_EVENT} WHERE topic = ? AND id = ? AND seq_nr > ? AND seq_nr <= ? ORDER BY seq_nr LIMIT ?"
_SCAN_EVENTS = f"""SELECT id, {_EVENT} WHERE topic = ? AND (id, seq_nr) > (?, ?) AND id <= ?
    ORDER BY id, seq_nr LIMIT ?"""
_SCAN_HEADS = "SELECT id, head FROM metajournal WHERE topic = ? AND id <= ? AND id > ? ORDER BY id LIMIT ?"
_BORDERS = """SELECT id FROM (SELECT id, row_number() OVER (ORDER BY id) AS n FROM metajournal WHERE topic = ?)
    WHERE n % ? = 0 ORDER BY id"""
_TAG_ROWS = """SELECT log_ms, topic, partition, "offset", "index", epoch, id, incarnation_epoch,
    incarnation_offset, tag_seq_nr, seq_nr, time_ms, encoded FROM tag_views
    WHERE tag = ? AND log_ms < ? AND (log_ms, topic, partition, "offset", "index", epoch) > (?, ?, ?, ?, ?, ?)
    ORDER BY log_ms, topic, partition, "offset", "index", epoch LIMIT ?"""
_TOPIC_ROWS = """SELECT log_ms, epoch, "offset", id, seq_nr, "index", time_ms, encoded
    FROM journal INDEXED BY journal_by_time
    WHERE topic = ? AND log_ms < ? AND (log_ms, epoch, "offset", id, seq_nr) > (?, ?, ?, ?, ?)
    ORDER BY log_ms, epoch, "offset", id, seq_nr LIMIT ?"""
_SNAPSHOTS = """SELECT seq_nr, payload_type, payload, time_ms FROM snapshot
    WHERE topic = ? AND id = ? AND epoch = ? AND "offset" = ? ORDER BY seq_nr DESC"""
_EXPIRED = """SELECT expires_at_ms, id, head FROM metajournal INDEXED BY metajournal_expiring
    WHERE topic = ? AND expires_at_ms <= ? AND (expires_at_ms, id) > (?, ?) ORDER BY expires_at_ms, id LIMIT ?"""
_PARKED = """SELECT topic, partition, epoch, "offset", time_ms, id, reason, value FROM parked
    WHERE (topic, partition, epoch, "offset") > (?, ?, ?, ?) ORDER BY topic, partition, epoch, "offset" LIMIT ?"""


class SqliteStore(SqliteAdapter):
    """Implements `tidebook.store.port.StoreWriter` in `store.db` of a folder, which several processes may have open."""

    deletes_topics = True
    orders_topics = True

    def __init__(self, folder: str | Path, *, metrics: Metrics | None = None) -> None:
        super().__init__(folder, FILE, SCHEMA, metrics)

    # Reads of journals

    async def pointer(self, topic: str, partition: int) -> Pointer | None:
        return self._read(operations.read_pointer, topic, partition)

    async def head(self, key: Key) -> Head | None:
        rows = self._select("SELECT head FROM metajournal WHERE topic = ? AND id = ?", key)
        return decode_head(rows[0][0]) if rows else None

    async def heads(self, topic: str, ids: Sequence[str]) -> Mapping[str, Head]:
        sql = "SELECT id, head FROM metajournal WHERE topic = ? AND id IN (SELECT value FROM json_each(?))"
        return {id: decode_head(head) for id, head in self._select(sql, (topic, json.dumps(list(ids))))}

    async def events(self, key: Key, head: Head, *, after: int, to: int, limit: int) -> Sequence[EventRow]:
        return list(starmap(_event_row, self._read(_fetch_page, _EVENTS, (*key, after, to, limit), size_column=1)))

    async def ids(self, topic: str) -> AsyncIterator[str]:
        sql = "SELECT id FROM metajournal WHERE topic = ? AND id > ? AND live ORDER BY id LIMIT ?"
        async for page in self._pages(sql, (topic,), ("",)):
            for (id,) in page:
                yield id

    async def snapshots(self, key: Key, incarnation: Position) -> Sequence[StoredSnapshot]:
        return [StoredSnapshot(*row) for row in self._select(_SNAPSHOTS, (*key, *incarnation))]

    async def topic_config(self, topic: str) -> TopicConfig | None:
        rows = self._select("SELECT config FROM topic_config WHERE topic = ?", (topic,))
        return operations.decode_config(rows[0][0]) if rows else None

    async def topics(self) -> Sequence[str]:
        return [topic for (topic,) in self._select("SELECT topic FROM topic_config ORDER BY topic", ())]

    async def wait(self, topic: str, partition: int, *, beyond: Position | None, timeout_s: float) -> bool:

        def reached() -> bool:
            pointer = self._read(operations.read_pointer, topic, partition)
            return pointer is not None and (beyond is None or pointer.position > beyond)

        return await self._wait(operations.channel_of(topic, partition), reached, timeout_s)

    # Reads of streams by tag or topic

    async def tag_rows(
        self, tag: str, *, after: TagPosition | None, from_ms: int, until_ms: int, limit: int
    ) -> Sequence[TagRow]:
        start = (from_ms, "", -1, -1, -1, -1)
        if after is not None and after.time_ms >= from_ms:
            start = (after.time_ms, after.topic, after.partition, after.offset, after.index, after.epoch)
        rows = self._read(_fetch_page, _TAG_ROWS, (tag, until_ms, *start, limit), size_column=12)
        return list(starmap(partial(TagRow, tag), rows))

    async def topic_rows(
        self, topic: str, *, after: TopicPosition | None, until_ms: int, limit: int
    ) -> Sequence[TopicRow]:
        """Return the first events of a topic after `after`, in order: at most `limit`, and fewer if they are large."""
        start = (-1, -1, -1, "", -1) if after is None else astuple(after)
        rows = self._read(_fetch_page, _TOPIC_ROWS, (topic, until_ms, *start, limit), size_column=7)
        return list(starmap(TopicRow, rows))

    async def tags(self) -> AsyncIterator[str]:
        last = ""
        while rows := self._select("SELECT min(tag) FROM tag_views WHERE tag > ?", (last,)):
            (last,) = rows[0]
            if last is None:
                return
            yield last

    async def pointers(self, topic: str) -> Mapping[int, Pointer]:
        sql = 'SELECT partition, epoch, "offset", time_ms FROM pointer WHERE topic = ?'
        return {row[0]: Pointer(Position(row[1], row[2]), row[3]) for row in self._select(sql, (topic,))}

    async def replicated_ms(self) -> int:
        ((time_ms,),) = self._select("SELECT max(time_ms) FROM pointer", ())
        return time_ms or 0

    async def wait_any(self, *, timeout_s: float, since: int = -1) -> int:
        self._database.check_usable()
        wakeups = self._file.wakeups
        await wakeups.wait(operations.ANY_POINTER, since=since, timeout_s=timeout_s)
        return wakeups.count(operations.ANY_POINTER)

    # Full scans

    async def splits(self, topic: str, *, count: int) -> Sequence[ScanSplit]:
        """Return at most `count` ranges of ids, low < id ≤ high, with about the same number of heads each."""
        ((heads,),) = self._select("SELECT count(*) FROM metajournal WHERE topic = ?", (topic,))
        step = -(-heads // max(count, 1)) or 1
        inner = [id for (id,) in self._select(_BORDERS, (topic, step))]
        return [ScanSplit(low, high) for low, high in pairwise(["", *inner[: count - 1], _AFTER_ALL_IDS])]

    async def heads_in(self, topic: str, split: ScanSplit) -> AsyncIterator[Sequence[tuple[str, Head]]]:
        async for page in self._scan_heads(topic, split):
            yield [(id, decode_head(head)) for id, head in page]

    async def events_in(self, topic: str, split: ScanSplit) -> AsyncIterator[Sequence[tuple[str, EventRow]]]:
        low: tuple[str, int] = (split.low, 2**63 - 1)
        while rows := self._read(_fetch_page, _SCAN_EVENTS, (topic, *low, split.high, SCAN_PAGE_MAX), size_column=2):
            yield [(row[0], _event_row(*row[1:])) for row in rows]
            low = rows[-1][:2]
            await asyncio.sleep(0)

    # Scans for verify and repair

    async def inspect(
        self, topic: str, split: ScanSplit
    ) -> AsyncIterator[Sequence[tuple[str, Head | EventRow | Damage]]]:
        async for heads in self._scan_heads(topic, split):
            yield [(id, _head_or_damage(topic, id, data)) for id, data in heads]
        async for events in self.events_in(topic, split):
            yield [(id, _event_or_damage(topic, id, row)) for id, row in events]

    async def inspect_tag(
        self, tag: str, *, after: TagPosition | None, from_ms: int, until_ms: int, limit: int
    ) -> Sequence[TagRow | Damage]:
        page = await self.tag_rows(tag, after=after, from_ms=from_ms, until_ms=until_ms, limit=limit)
        return [_tag_row_or_damage(row) for row in page]

    def _scan_heads(self, topic: str, split: ScanSplit) -> AsyncIterator[list[Any]]:
        return self._pages(_SCAN_HEADS, (topic, split.high), (split.low,), SCAN_PAGE_MAX)

    # Writes

    async def apply(self, writes: SliceWrites) -> None:
        """Apply a slice in one transaction.

        Do nothing if the pointer is at or after the slice's end already; otherwise raise Fenced if it is not the one
        that the slice was planned from.
        """
        await self._run(operations.apply_slice, writes)

    async def repair(self, repair: Repair) -> None:
        """Repair one journal in one transaction; raise Fenced if the partition's pointer is not `repair.pointer`."""
        await self._run(operations.repair_journal, repair)

    async def save_snapshot(self, key: Key, incarnation: Position, snapshot: StoredSnapshot, *, slots: int) -> None:
        await self._run(operations.save_snapshot, (key, incarnation, snapshot, slots))

    async def delete_snapshots(self, key: Key, incarnation: Position, *, to: int) -> None:
        await self._run(operations.delete_snapshots, (key, incarnation, to))

    async def set_topic_config(self, topic: str, config: TopicConfig, *, expected: TopicConfig | None) -> TopicConfig:
        current: TopicConfig = await self._run(operations.set_config, (topic, config, expected))
        return current

    async def delete_topic(self, topic: str) -> None:
        """Delete all rows of a topic, in one transaction."""
        await self._run(operations.delete_topic, topic)

    async def setting(self, name: str) -> str | None:
        rows = self._select("SELECT value FROM setting WHERE name = ?", (name,))
        return rows[0][0] if rows else None

    async def setting_names(self, prefix: str) -> Sequence[str]:
        rows = self._select("SELECT name FROM setting WHERE name >= ? ORDER BY name", (prefix,))
        return [name for (name,) in takewhile(lambda row: row[0].startswith(prefix), rows)]

    async def set_setting(self, name: str, value: str, *, expected: str | None) -> bool:
        was_expected: bool = await self._run(operations.set_setting, (name, value, expected))
        return was_expected

    async def expired(self, topic: str, *, now_ms: int) -> AsyncIterator[tuple[str, Head]]:
        """Yield the ids and heads of the live journals with expires_at_ms ≤ `now_ms`, the earliest expiry first."""
        async for page in self._pages(_EXPIRED, (topic, now_ms), (-(2**63), "")):
            for _, id, head in page:
                yield id, decode_head(head)

    async def graves(self, topic: str) -> AsyncIterator[tuple[str, Head]]:
        sql = "SELECT id, head FROM metajournal WHERE topic = ? AND id > ? AND NOT live ORDER BY id LIMIT ?"
        async for page in self._pages(sql, (topic,), ("",)):
            for id, head in page:
                yield id, decode_head(head)

    async def remove_graves(self, topic: str, graves: Sequence[tuple[str, Head]]) -> None:
        await self._run(operations.remove_graves, tuple((topic, id, encode_head(head)) for id, head in graves))

    async def parked(self, topic: str | None = None) -> AsyncIterator[Parked]:
        async for page in self._pages(_PARKED, (), (topic or "", -1, -1, -1)):
            for row_topic, partition, epoch, offset, time_ms, id, reason, value in page:
                if topic is not None and row_topic != topic:
                    return
                yield Parked(row_topic, partition, Position(epoch, offset), time_ms, id, reason, value)

    async def unpark(self, parked: Iterable[Parked]) -> None:
        await self._run(operations.unpark, tuple(parked))

    async def _pages(
        self, sql: str, bindings: tuple[Any, ...], last: tuple[Any, ...], limit: int = PAGE_MAX
    ) -> AsyncIterator[list[Any]]:
        """Yield pages of a query for rows after `last`, the values of its first columns, by which it sorts."""
        while page := self._select(sql, (*bindings, *last, limit)):
            yield page
            last = page[-1][: len(last)]
            await asyncio.sleep(0)


def _fetch_page(connection: apsw.Connection, sql: str, bindings: tuple[Any, ...], size_column: int) -> list[Any]:
    """Return the rows of a query, or its first ones if the sizes in `size_column` exceed PAGE_BYTES_MAX."""
    page: list[Any] = []
    size_bytes = 0
    rows: Any = connection.execute(sql, bindings)
    # Fetching in steps costs half as much as fetching single rows. Steps are short, because their size in bytes is only
    # known afterwards.
    while size_bytes <= PAGE_BYTES_MAX and (step := list(islice(rows, STEP_ROWS))):
        page += step
        with suppress(TypeError):  # a damaged column may hold a number, which the reader of the page reports
            size_bytes += sum([len(row[size_column]) for row in step])
    rows.close()
    return page


def _event_row(seq_nr: int, encoded: bytes, time_ms: int, epoch: int, offset: int, index: int, log_ms: int) -> EventRow:
    return EventRow(seq_nr, encoded, time_ms, Position(epoch, offset), index, log_ms)


def _head_or_damage(topic: str, id: str, data: Any) -> Head | Damage:
    try:
        return decode_head(data)
    except (Corrupt, TypeError) as error:
        return Damage("head", topic, id, str(error))


def _event_or_damage(topic: str, id: str, row: EventRow) -> EventRow | Damage:
    """Return the row, or Damage if its event cannot be decoded or a column has a wrong type, which SQLite permits."""
    encoded: object = row.encoded
    numbers = (row.timestamp_ms, row.position.epoch, row.position.offset, row.index, row.time_ms)
    if not isinstance(encoded, bytes) or not all(isinstance(each, int) for each in numbers):
        return Damage("event", topic, id, "a column of the event has the wrong type", seq_nr=row.seq_nr)
    try:
        event_tags(encoded)
    except Corrupt as error:
        return Damage("event", topic, id, str(error), seq_nr=row.seq_nr)
    return row


def _tag_row_or_damage(row: TagRow) -> TagRow | Damage:
    """Return the row, or Damage if a column has a wrong type."""
    encoded: object = row.encoded
    id: object = row.id
    numbers = (row.incarnation_epoch, row.incarnation_offset, row.tag_seq_nr, row.seq_nr, row.timestamp_ms)
    if isinstance(encoded, bytes) and isinstance(id, str) and all(isinstance(each, int) for each in numbers):
        return row
    return Damage("tag", row.topic, None, "a column of the tag row has the wrong type", place=row.place)
