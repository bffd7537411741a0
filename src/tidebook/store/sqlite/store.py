"""The store in a SQLite file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, starmap
from operator import itemgetter
from pathlib import Path
from typing import Any

import apsw

from tidebook.core.errors import TidebookError, Unavailable
from tidebook.core.head import Head, decode_head, encode_head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.repair import Damage, Repair
from tidebook.core.replication_plan import EventRow, Parked, Pointer, SliceWrites, TagPosition, TagRow
from tidebook.core.topic_config import TopicConfig
from tidebook.runtime.metrics import Metrics
from tidebook.sqlite.multi_insert import each_row
from tidebook.sqlite.shared_files import SharedFile
from tidebook.sqlite.writer import WriteOperation, nothing
from tidebook.store.port import ScanSplit, StoredSnapshot
from tidebook.store.sqlite import id_ranges
from tidebook.store.sqlite import writes as operations
from tidebook.store.sqlite.apply_slice import ANY_POINTER, POINTER, apply, channel_of, pointer_of
from tidebook.store.sqlite.repair import repair_journals
from tidebook.store.sqlite.tables import FILE, SCHEMA

PAGE_MAX = 1_000
PAGE_BYTES_MAX = 8_000_000
#: Number of tag rows that are fetched before their size is checked.
STEP_ROWS = 50

_EVENTS = """SELECT seq_nr, kept, time_ms, epoch, "offset", "index", log_ms FROM journal
    WHERE topic = ? AND id = ? AND seq_nr > ? AND seq_nr <= ? ORDER BY seq_nr LIMIT ?"""
_TAG_ROWS = """SELECT log_ms, topic, partition, "offset", "index", epoch, id, life_epoch, life_offset, tag_seq_nr,
    seq_nr, time_ms, kept FROM tag_views
    WHERE tag = ? AND log_ms < ? AND (log_ms, topic, partition, "offset", "index", epoch) > (?, ?, ?, ?, ?, ?)
    ORDER BY log_ms, topic, partition, "offset", "index", epoch LIMIT ?"""
_SNAPSHOTS = """SELECT seq_nr, payload_type, payload, time_ms FROM snapshot
    WHERE topic = ? AND id = ? AND epoch = ? AND "offset" = ? ORDER BY seq_nr DESC"""
_EXPIRED = """SELECT expires_at_ms, id, head FROM metajournal INDEXED BY metajournal_expiring
    WHERE topic = ? AND expires_at_ms <= ? AND (expires_at_ms, id) > (?, ?) ORDER BY expires_at_ms, id LIMIT ?"""
_PARKED = """SELECT topic, partition, epoch, "offset", time_ms, id, reason, value FROM parked
    WHERE (topic, partition, epoch, "offset") > (?, ?, ?, ?) ORDER BY topic, partition, epoch, "offset" LIMIT ?"""

#: The column `kept` of a row of _TAG_ROWS.
_encoded_event = itemgetter(12)


class SqliteStore:
    """Implements `tidebook.store.port.StoreWriter` in the file `store.db` of a folder.

    Several processes may have the folder open.
    """

    deletes_topics = True

    def __init__(self, folder: str | Path, *, metrics: Metrics | None = None) -> None:
        self._file = SharedFile.open(folder, FILE, SCHEMA, metrics=metrics)
        self._database = self._file.database
        self._closed = False

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self._file.path

    def damage(self) -> list[str]:
        """Read the whole file and return the problems that SQLite finds; an empty list if there are none."""
        return self._database.damage()

    # Reads of applications

    async def pointer(self, topic: str, partition: int) -> Pointer | None:
        """Return how far a partition is replicated, or None if it never was."""
        return self._pointer(topic, partition)

    async def head(self, key: Key) -> Head | None:
        """Return the head or the grave of a journal, or None if it has neither."""
        rows = self._select("SELECT head FROM metajournal WHERE topic = ? AND id = ?", key)
        return decode_head(rows[0][0]) if rows else None

    async def heads(self, topic: str, ids: Sequence[str]) -> Mapping[str, Head]:
        """Return the heads and graves of many journals by id; ids that have neither are absent."""
        sql = "SELECT id, head FROM metajournal WHERE topic = ? AND id IN (VALUES {})"
        try:
            with self._database.reading() as connection:
                found = each_row(connection, sql, (topic,), ids)
        except apsw.Error as error:
            raise self._database.failure(error) from error
        return {id: decode_head(head) for id, head in found}

    async def events(self, key: Key, head: Head, *, after: int, to: int, limit: int) -> Sequence[EventRow]:
        """Return the first rows with `after` < seq_nr ≤ `to`, in order: at most `limit`, fewer if they are large."""
        page: list[EventRow] = []
        size_bytes = 0
        try:
            with self._database.reading() as connection:
                rows = connection.execute(_EVENTS, (*key, after, to, limit))
                for seq_nr, kept, time_ms, epoch, offset, index, log_ms in rows:
                    page.append(EventRow(seq_nr, kept, time_ms, Position(epoch, offset), index, log_ms))
                    size_bytes += len(kept)
                    if size_bytes > PAGE_BYTES_MAX:
                        break
                rows.close()
        except apsw.Error as error:
            raise self._database.failure(error) from error
        return page

    async def ids(self, topic: str) -> AsyncIterator[str]:
        """Yield the ids of a topic's live journals, each once, in order."""
        sql = "SELECT id FROM metajournal WHERE topic = ? AND id > ? AND live ORDER BY id LIMIT ?"
        last = ""
        while page := self._select(sql, (topic, last, PAGE_MAX)):
            for (id,) in page:
                yield id
            last = page[-1][0]
            await asyncio.sleep(0)

    async def snapshots(self, key: Key, incarnation: Position) -> Sequence[StoredSnapshot]:
        """Return the snapshots of one incarnation of a journal, in descending order of seq_nr."""
        return [StoredSnapshot(*row) for row in self._select(_SNAPSHOTS, (*key, *incarnation))]

    async def topic_config(self, topic: str) -> TopicConfig | None:
        """Return the configuration of a topic, or None if it was never set."""
        rows = self._select("SELECT config FROM topic_config WHERE topic = ?", (topic,))
        return operations.decode_config(rows[0][0]) if rows else None

    async def topics(self) -> Sequence[str]:
        """Return the names of the topics that have a configuration, in order."""
        return [topic for (topic,) in self._select("SELECT topic FROM topic_config ORDER BY topic", ())]

    async def wait(self, topic: str, partition: int, *, beyond: Position | None, timeout_s: float) -> bool:
        """Return True as soon as the partition's pointer is after `beyond`, or False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        channel, wakeups = channel_of(topic, partition), self._file.wakeups
        while True:
            seen = wakeups.count(channel)
            pointer = self._pointer(topic, partition)
            if pointer is not None and (beyond is None or pointer.position > beyond):
                return True
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            await wakeups.wait(channel, since=seen, timeout_s=left_s)

    # Reads of queries by tag

    async def tag_rows(
        self, tag: str, *, after: TagPosition | None, from_ms: int, until_ms: int, limit: int
    ) -> Sequence[TagRow]:
        """Return the first rows of a tag after `after`, in order: at most `limit`, and fewer if they are large."""
        start = (from_ms, "", -1, -1, -1, -1)
        if after is not None and after.time_ms >= from_ms:
            start = (after.time_ms, after.topic, after.partition, after.offset, after.index, after.epoch)
        page: list[TagRow] = []
        new_row = partial(TagRow, tag)
        size_bytes = 0
        try:
            with self._database.reading() as connection:
                rows = connection.execute(_TAG_ROWS, (tag, until_ms, *start, limit))
                # Fetch in steps, without a Python loop over the rows: that would cost more than reading them.
                while step := list(islice(rows, STEP_ROWS)):
                    page += starmap(new_row, step)
                    size_bytes += sum(map(len, map(_encoded_event, step)))
                    if size_bytes > PAGE_BYTES_MAX:
                        break
                rows.close()
        except apsw.Error as error:
            raise self._database.failure(error) from error
        return page

    async def tags(self) -> AsyncIterator[str]:
        """Yield the tags that have rows, each once, in order."""
        last = ""
        while rows := self._select("SELECT min(tag) FROM tag_views WHERE tag > ?", (last,)):
            (last,) = rows[0]
            if last is None:
                return
            yield last

    async def pointers(self, topic: str) -> Mapping[int, Pointer]:
        """Return the pointer of each partition of a topic; partitions that were never replicated are absent."""
        sql = 'SELECT partition, epoch, "offset", time_ms FROM pointer WHERE topic = ?'
        return {row[0]: Pointer(Position(row[1], row[2]), row[3]) for row in self._select(sql, (topic,))}

    async def wait_any(self, *, timeout_s: float, since: int = -1) -> int:
        """Return once any pointer may have moved since `since`, or after `timeout_s`; return the next `since`."""
        self._database.refuse()
        wakeups = self._file.wakeups
        await wakeups.wait(ANY_POINTER, since=since, timeout_s=timeout_s)
        return wakeups.count(ANY_POINTER)

    # Full scans

    async def splits(self, topic: str, *, count: int) -> Sequence[ScanSplit]:
        """Return at most `count` ranges of ids that together cover the topic."""
        try:
            return id_ranges.id_splits(self._database, topic, count)
        except apsw.Error as error:
            raise self._database.failure(error) from error

    def heads_in(self, topic: str, split: ScanSplit) -> AsyncIterator[Sequence[tuple[str, Head]]]:
        """Yield pages of the split's heads and graves, by id."""
        return self._pages(id_ranges.heads_in(self._database, topic, split))

    def events_in(self, topic: str, split: ScanSplit) -> AsyncIterator[Sequence[tuple[str, EventRow]]]:
        """Yield pages of the split's event rows as they are stored, by id."""
        return self._pages(id_ranges.events_in(self._database, topic, split))

    # Scans of a repair

    async def inspect(
        self, topic: str, split: ScanSplit
    ) -> AsyncIterator[Sequence[tuple[str, Head | EventRow | Damage]]]:
        """Yield what `heads_in` and then what `events_in` yields, with Damage for rows that cannot be decoded."""
        async for heads in self._pages(id_ranges.inspect_heads(self._database, topic, split)):
            yield heads
        async for events in self.events_in(topic, split):
            yield [(id, id_ranges.event_or_damage(topic, id, row)) for id, row in events]

    async def inspect_tag(
        self, tag: str, *, after: TagPosition | None, from_ms: int, until_ms: int, limit: int
    ) -> Sequence[TagRow | Damage]:
        """Return what `tag_rows` returns, with Damage, which carries its place, for a damaged row."""
        page = await self.tag_rows(tag, after=after, from_ms=from_ms, until_ms=until_ms, limit=limit)
        return [id_ranges.tag_row_or_damage(row) for row in page]

    async def _pages(self, pages: Iterator[Any]) -> AsyncIterator[Any]:
        try:
            for page in pages:
                yield page
                await asyncio.sleep(0)
        except apsw.Error as error:
            raise self._database.failure(error) from error

    # Writes

    async def apply(self, writes: SliceWrites) -> None:
        """Apply a slice in one transaction.

        Do nothing if the pointer is at or after the slice's end already; otherwise raise Fenced if it is not the one
        that the slice was planned from.
        """
        await self._run(apply, writes)

    async def repair(self, repair: Repair) -> None:
        """Repair one journal in one transaction; raise Fenced if the partition's pointer is not `repair.pointer`."""
        await self._run(repair_journals, repair)

    async def save_snapshot(self, key: Key, incarnation: Position, snapshot: StoredSnapshot, *, slots: int) -> None:
        """Save a snapshot, replacing one of the same seq_nr; then keep only the `slots` latest of this incarnation."""
        await self._run(operations.save_snapshots, operations.SaveSnapshot(key, incarnation, snapshot, slots))

    async def delete_snapshots(self, key: Key, incarnation: Position, *, to: int) -> None:
        """Delete the snapshots of this incarnation with seq_nr ≤ `to`."""
        await self._run(operations.delete_snapshots, operations.DeleteSnapshots(key, incarnation, to))

    async def set_topic_config(self, topic: str, config: TopicConfig, *, expected: TopicConfig | None) -> TopicConfig:
        """Set a topic's configuration if it equals `expected`; return the one in force afterwards."""
        current: TopicConfig = await self._run(operations.set_configs, operations.NewConfig(topic, config, expected))
        return current

    async def delete_topic(self, topic: str) -> None:
        """Delete all rows of a topic, in one transaction."""
        await self._run(operations.delete_topics, topic)

    async def setting(self, name: str) -> str | None:
        """Return the value of a setting, or None if it is not set."""
        rows = self._select("SELECT value FROM setting WHERE name = ?", (name,))
        return rows[0][0] if rows else None

    async def set_setting(self, name: str, value: str, *, expected: str | None) -> bool:
        """Set a setting if its value is `expected`; return whether it was."""
        was_expected: bool = await self._run(operations.set_settings, operations.NewSetting(name, value, expected))
        return was_expected

    async def expired(self, topic: str, *, now_ms: int) -> AsyncIterator[tuple[str, Head]]:
        """Yield the ids and heads of the live journals with expires_at_ms ≤ `now_ms`, the earliest expiry first."""
        last: tuple[int, str] = (-(2**63), "")
        while page := self._select(_EXPIRED, (topic, now_ms, *last, PAGE_MAX)):
            for _, id, head in page:
                yield id, decode_head(head)
            last = page[-1][:2]
            await asyncio.sleep(0)

    async def graves(self, topic: str) -> AsyncIterator[tuple[str, Head]]:
        """Yield the ids and graves of a topic's purged journals, in order of the ids."""
        sql = "SELECT id, head FROM metajournal WHERE topic = ? AND id > ? AND NOT live ORDER BY id LIMIT ?"
        last = ""
        while page := self._select(sql, (topic, last, PAGE_MAX)):
            for id, head in page:
                yield id, decode_head(head)
            last = page[-1][0]
            await asyncio.sleep(0)

    async def remove_graves(self, topic: str, graves: Sequence[tuple[str, Head]]) -> None:
        """Delete graves, each only if it is still the journal's head."""
        await self._run(operations.remove_graves, tuple((topic, id, encode_head(head)) for id, head in graves))

    async def parked(self, topic: str | None = None) -> AsyncIterator[Parked]:
        """Yield the parked records, of one topic or of all."""
        last: tuple[str, int, int, int] = (topic or "", -1, -1, -1)
        while page := self._select(_PARKED, (*last, PAGE_MAX)):
            for row_topic, partition, epoch, offset, time_ms, id, reason, value in page:
                if topic is not None and row_topic != topic:
                    return
                yield Parked(row_topic, partition, Position(epoch, offset), time_ms, id, reason, value)
            last = page[-1][:4]
            await asyncio.sleep(0)

    async def unpark(self, parked: Iterable[Parked]) -> None:
        """Delete parked records."""
        await self._run(operations.unpark, tuple(parked))

    async def close(self) -> None:
        """Wait for the writes in progress, then release the file. A second call does nothing."""
        if self._closed or self._database.forked:
            return
        self._closed = True
        try:
            await self._file.writer.run(nothing, None)
        except TidebookError:  # the callers of the writes have got the same error
            pass
        finally:
            await asyncio.to_thread(self._file.release)

    async def _run(self, run: WriteOperation, argument: Any) -> Any:
        if self._closed:
            raise Unavailable(f"{self._file.path} is closed")
        return await self._file.writer.run(run, argument)

    def _pointer(self, topic: str, partition: int) -> Pointer | None:
        rows = self._select(POINTER, (topic, partition))
        return pointer_of(rows[0] if rows else None)

    def _select(self, sql: str, bindings: tuple[Any, ...]) -> list[Any]:
        try:
            with self._database.reading() as connection:
                return connection.execute(sql, bindings).fetchall()
        except apsw.Error as error:
            raise self._database.failure(error) from error
