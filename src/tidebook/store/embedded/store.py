"""The store on one machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import apsw

from tidebook.core.errors import TidebookError, Unavailable
from tidebook.core.head import Head, decode_head
from tidebook.core.key import Key
from tidebook.core.mend import Mend
from tidebook.core.metrics import Metrics
from tidebook.core.position import Position
from tidebook.core.replication import EventRow, Parked, Pointer, SliceWrites, TagPlace, TagRow
from tidebook.core.topic import TopicFacts
from tidebook.folder.inbox import Run, nothing
from tidebook.folder.opened import File
from tidebook.folder.rows import each_row
from tidebook.store.embedded import changes, mending, parts
from tidebook.store.embedded.slices import ANY_POINTER, POINTER, apply, channel_of, pointer_of
from tidebook.store.embedded.tables import FILE, SCHEMA
from tidebook.store.embedded.tag_rows import tag_page
from tidebook.store.port import Snapshot, Split

PAGE_MAX = 1_000
PAGE_BYTES_MAX = 8_000_000

_EVENTS = """SELECT seq_nr, kept, time_ms, epoch, "offset", "index", log_ms FROM journal
    WHERE topic = ? AND id = ? AND seq_nr > ? AND seq_nr <= ? ORDER BY seq_nr LIMIT ?"""
_SNAPSHOTS = """SELECT seq_nr, payload_type, payload, time_ms FROM snapshot
    WHERE topic = ? AND id = ? AND epoch = ? AND "offset" = ? ORDER BY seq_nr DESC"""
_EXPIRED = """SELECT expires_at_ms, id, head FROM metajournal INDEXED BY metajournal_expiring
    WHERE topic = ? AND expires_at_ms <= ? AND (expires_at_ms, id) > (?, ?) ORDER BY expires_at_ms, id LIMIT ?"""
_PARKED = """SELECT topic, partition, epoch, "offset", time_ms, id, reason, value FROM parked
    WHERE (topic, partition, epoch, "offset") > (?, ?, ?, ?) ORDER BY topic, partition, epoch, "offset" LIMIT ?"""


class EmbeddedStore:
    """A store in `store.db` of a folder, which several processes may have open."""

    def __init__(self, folder: str | Path, *, metrics: Metrics | None = None) -> None:
        self._file = File.open(folder, FILE, SCHEMA, metrics=metrics)
        self._database = self._file.database
        self._closed = False

    @property
    def path(self) -> Path:
        """Its file."""
        return self._file.path

    def damage(self) -> list[str]:
        """What SQLite finds wrong when it reads the whole file; empty where all is well."""
        return self._database.damage()

    # What apps read

    async def pointer(self, topic: str, partition: int) -> Pointer | None:
        """How far a partition is replicated."""
        return self._pointer(topic, partition)

    async def head(self, key: Key) -> Head | None:
        """The head, or the grave, of a journal."""
        rows = self._select("SELECT head FROM metajournal WHERE topic = ? AND id = ?", key)
        return decode_head(rows[0][0]) if rows else None

    async def heads(self, topic: str, ids: Sequence[str]) -> Mapping[str, Head]:
        """Many heads at once; ids without one are absent."""
        sql = "SELECT id, head FROM metajournal WHERE topic = ? AND id IN (VALUES {})"
        try:
            found = each_row(self._database.reader(), sql, (topic,), ids)
        except apsw.Error as error:
            raise self._database.failure(error) from error
        return {id: decode_head(head) for id, head in found}

    async def events(self, key: Key, head: Head, *, after: int, to: int, limit: int) -> Sequence[EventRow]:
        """The next rows with after < seq_nr ≤ to, in order, at most `limit`, and fewer where they are large."""
        page: list[EventRow] = []
        size_bytes = 0
        try:
            rows = self._database.reader().execute(_EVENTS, (*key, after, to, limit))
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
        """The ids of a topic's live journals, each once, in order."""
        sql = "SELECT id FROM metajournal WHERE topic = ? AND id > ? AND live ORDER BY id LIMIT ?"
        last = ""
        while page := self._select(sql, (topic, last, PAGE_MAX)):
            for (id,) in page:
                yield id
            last = page[-1][0]
            await asyncio.sleep(0)

    async def snapshots(self, key: Key, incarnation: Position) -> Sequence[Snapshot]:
        """The snapshots of one life of a journal, newest (largest seq_nr) first."""
        return [Snapshot(*row) for row in self._select(_SNAPSHOTS, (*key, *incarnation))]

    async def facts(self, topic: str) -> TopicFacts | None:
        """The facts of a topic."""
        rows = self._select("SELECT facts FROM facts WHERE topic = ?", (topic,))
        return changes.decode_facts(rows[0][0]) if rows else None

    async def topics(self) -> Sequence[str]:
        """The topics that have facts."""
        return [topic for (topic,) in self._select("SELECT topic FROM facts ORDER BY topic", ())]

    async def wait(self, topic: str, partition: int, *, beyond: Position | None, timeout_s: float) -> bool:
        """Wait until the pointer is beyond this position; False when the time ran out first."""
        deadline = time.monotonic() + timeout_s
        channel, pings = channel_of(topic, partition), self._file.pings
        while True:
            heard = pings.count(channel)
            pointer = self._pointer(topic, partition)
            if pointer is not None and (beyond is None or pointer.position > beyond):
                return True
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            await pings.wait(channel, since=heard, timeout_s=left_s)

    # What queries by tag read

    async def tag_rows(
        self, tag: str, *, after: TagPlace | None, from_ms: int, until_ms: int, limit: int
    ) -> Sequence[TagRow]:
        """The next rows of a tag behind `after`, in order of their place."""
        return tag_page(self._database, tag, after, from_ms, until_ms, limit)

    async def tags(self) -> AsyncIterator[str]:
        """The tags that have rows, each once, in order."""
        last = ""
        while rows := self._select("SELECT min(tag) FROM tag_views WHERE tag > ?", (last,)):
            (last,) = rows[0]
            if last is None:
                return
            yield last

    async def pointers(self, topic: str) -> Mapping[int, Pointer]:
        """How far each partition of a topic is replicated."""
        sql = 'SELECT partition, epoch, "offset", time_ms FROM pointer WHERE topic = ?'
        return {row[0]: Pointer(Position(row[1], row[2]), row[3]) for row in self._select(sql, (topic,))}

    async def wait_any(self, *, timeout_s: float, since: int = -1) -> int:
        """Wait until some pointer may have moved since then, or the time ran out; returns the next call's `since`."""
        pings = self._file.pings
        await pings.wait(ANY_POINTER, since=since, timeout_s=timeout_s)
        return pings.count(ANY_POINTER)

    # What jobs read that look at everything

    async def splits(self, topic: str, *, count: int) -> Sequence[Split]:
        """Ranges of ids."""
        try:
            return parts.id_splits(self._database, topic, count)
        except apsw.Error as error:
            raise self._database.failure(error) from error

    def heads_in(self, topic: str, split: Split) -> AsyncIterator[Sequence[tuple[str, Head]]]:
        """Pages of a part's heads, graves included."""
        return self._pages(parts.heads_in(self._database, topic, split))

    def events_in(self, topic: str, split: Split) -> AsyncIterator[Sequence[tuple[str, EventRow]]]:
        """Pages of a part's event rows as they lie there."""
        return self._pages(parts.events_in(self._database, topic, split))

    async def _pages(self, pages: Iterator[Any]) -> AsyncIterator[Any]:
        try:
            for page in pages:
                yield page
                await asyncio.sleep(0)
        except apsw.Error as error:
            raise self._database.failure(error) from error

    # What the pipeline, and the few explicit acts of an app, write

    async def apply(self, writes: SliceWrites) -> None:
        """Carry out a slice in one transaction.

        Nothing is done where the pointer is there already. Fenced where it is not the one that the slice began from.
        """
        await self._run(apply, writes)

    async def mend(self, mend: Mend) -> None:
        """Put right one journal in one transaction; Fenced where the partition's pointer has moved."""
        await self._run(mending.mend, mend)

    async def save_snapshot(self, key: Key, incarnation: Position, snapshot: Snapshot, *, slots: int) -> None:
        """Keep a snapshot: the same seq_nr overwrites, then only the `slots` newest stay."""
        await self._run(changes.save_snapshots, changes.Save(key, incarnation, snapshot, slots))

    async def delete_snapshots(self, key: Key, incarnation: Position, *, to: int) -> None:
        """Remove the snapshots of this life up to `to`."""
        await self._run(changes.drop_snapshots, changes.Drop(key, incarnation, to))

    async def set_facts(self, topic: str, facts: TopicFacts, *, expected: TopicFacts | None) -> TopicFacts:
        """Compare and set; returns what holds afterwards, which may be another's."""
        held: TopicFacts = await self._run(changes.set_facts, changes.NewFacts(topic, facts, expected))
        return held

    async def setting(self, name: str) -> str | None:
        """A setting by name."""
        rows = self._select("SELECT value FROM setting WHERE name = ?", (name,))
        return rows[0][0] if rows else None

    async def set_setting(self, name: str, value: str, *, expected: str | None) -> bool:
        """Compare and set a setting; False where it was not as expected."""
        done: bool = await self._run(changes.set_settings, changes.NewSetting(name, value, expected))
        return done

    async def expired(self, topic: str, *, now_ms: int) -> AsyncIterator[tuple[str, Head]]:
        """Live journals whose expiry has passed, with their heads, the longest passed first."""
        last: tuple[int, str] = (-(2**63), "")
        while page := self._select(_EXPIRED, (topic, now_ms, *last, PAGE_MAX)):
            for _, id, head in page:
                yield id, decode_head(head)
            last = page[-1][:2]
            await asyncio.sleep(0)

    async def parked(self, topic: str | None = None) -> AsyncIterator[Parked]:
        """Records that were kept aside."""
        last: tuple[str, int, int, int] = (topic or "", -1, -1, -1)
        while page := self._select(_PARKED, (*last, PAGE_MAX)):
            for of, partition, epoch, offset, time_ms, id, reason, value in page:
                if topic is not None and of != topic:
                    return
                yield Parked(of, partition, Position(epoch, offset), time_ms, id, reason, value)
            last = page[-1][:4]
            await asyncio.sleep(0)

    async def unpark(self, parked: Iterable[Parked]) -> None:
        """Forget parked records."""
        await self._run(changes.unpark, tuple(parked))

    async def close(self) -> None:
        """Finish what was asked for, then let go."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._file.writer.run(nothing, None)
        except TidebookError:  # whoever asked for something was told the same
            pass
        finally:
            await asyncio.to_thread(self._file.release)

    async def _run(self, run: Run, argument: Any) -> Any:
        if self._closed:
            raise Unavailable(f"{self._file.path} is closed")
        return await self._file.writer.run(run, argument)

    def _pointer(self, topic: str, partition: int) -> Pointer | None:
        rows = self._select(POINTER, (topic, partition))
        return pointer_of(rows[0] if rows else None)

    def _select(self, sql: str, bindings: tuple[Any, ...]) -> list[Any]:
        try:
            return self._database.reader().execute(sql, bindings).fetchall()
        except apsw.Error as error:
            raise self._database.failure(error) from error
