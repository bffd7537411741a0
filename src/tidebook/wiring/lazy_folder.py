"""Open an embedded log and store lazily: reads of a missing folder return nothing, the first write creates the files.

A program that only reads must create nothing; otherwise a misspelt folder would become a new, empty book. Another
process may create the files at any time, so every call checks for them until they exist.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from tidebook.core.errors import NotFound, Unavailable
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.repair import Damage, Repair
from tidebook.core.replication_plan import EventRow, Parked, Pointer, SliceWrites, TagPosition, TagRow
from tidebook.core.topic_config import TopicConfig
from tidebook.log.port import Acknowledged, OnSent, OnSentMany, Outgoing, RecordColumns, RecordPage, TopicState
from tidebook.log.sqlite.log import SqliteLog
from tidebook.sqlite.errors import from_os
from tidebook.store.port import ScanSplit, StoredSnapshot
from tidebook.store.sqlite.store import SqliteStore

#: How often a wait checks whether another process has created the files; no wake-up exists before that.
POLL_INTERVAL_S = 0.2


class _Closable(Protocol):
    async def close(self) -> None: ...


T = TypeVar("T", bound=_Closable)
Item = TypeVar("Item")


class _LazyAdapter(Generic[T]):
    """Hold an adapter that opens when its file exists or when a write needs it."""

    def __init__(self, path: Path, make: Callable[[], T]) -> None:
        self.path = path
        self._make = make
        self._adapter: T | None = None
        self._closed = False

    def open_existing(self) -> T | None:
        """Return the adapter, opening it if its file exists; return None if there is no file."""
        if self._adapter is None and self._file_exists():
            return self.open_or_create()
        return self._adapter

    def open_or_create(self) -> T:
        """Return the adapter, opening it and creating the folder and the file if they are missing."""
        if self._closed:
            raise Unavailable(f"{self.path} is closed")
        if self._adapter is None:
            self._adapter = adapter = self._make()
            # Replace the delegating methods by the adapter's own, so that an append has no extra call.
            for name in dir(type(self)):
                if not name.startswith("_") and name not in _NOT_DELEGATED and callable(getattr(adapter, name, None)):
                    setattr(self, name, getattr(adapter, name))
        return self._adapter

    def _file_exists(self) -> bool:
        if self._closed:
            raise Unavailable(f"{self.path} is closed")
        # A SQLite write-ahead file without its database is damage; opening the adapter reports it.
        return _exists(self.path) or _exists(self.path.with_name(self.path.name + "-wal"))

    def damage(self) -> list[str]:
        """Return the errors of SQLite's integrity check of the whole file; return none if there is no file."""
        return []

    async def close(self) -> None:
        """Close the adapter if it is open; every later call raises `Unavailable`."""
        self._closed = True
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            await adapter.close()


#: Public names that stay with the lazy object when the adapter opens.
_NOT_DELEGATED = frozenset({"open_existing", "open_or_create", "close", "path"})


def _exists(path: Path) -> bool:
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise from_os(error, path) from error
    return True


class LazyLog(_LazyAdapter[SqliteLog]):
    """Implement `tidebook.log.port.Log` over a folder that may not exist yet."""

    indexed_by_key = True
    end_is_linearizable = True

    def _existing_log(self, topic: str) -> SqliteLog:
        log = self.open_existing()
        if log is None:
            raise NotFound(f"there is no topic {topic}")
        return log

    async def create_topic(
        self, topic: str, partitions: int, *, limit_bytes: int | None = None, keep_forever: bool = False
    ) -> TopicState:
        return await self.open_or_create().create_topic(
            topic, partitions, limit_bytes=limit_bytes, keep_forever=keep_forever
        )

    async def topic(self, topic: str) -> TopicState | None:
        log = self.open_existing()
        return None if log is None else await log.topic(topic)

    async def topics(self) -> list[str]:
        log = self.open_existing()
        return [] if log is None else await log.topics()

    async def delete_topic(self, topic: str) -> None:
        await self._existing_log(topic).delete_topic(topic)

    def send(self, record: Outgoing, on_sent: OnSent) -> None:
        self.open_or_create().send(record, on_sent)

    def send_many(self, many: RecordColumns, on_sent: OnSentMany) -> None:
        self.open_or_create().send_many(many, on_sent)

    async def append(self, record: Outgoing) -> Acknowledged:
        return await self.open_or_create().append(record)

    async def read(
        self,
        topic: str,
        partition: int,
        *,
        start: int,
        stop: int,
        key: bytes | None = None,
        limit: int = 1000,
        limit_bytes: int = 4_000_000,
    ) -> RecordPage:
        log = self._existing_log(topic)
        return await log.read(topic, partition, start=start, stop=stop, key=key, limit=limit, limit_bytes=limit_bytes)

    async def start(self, topic: str, partition: int) -> int:
        return await self._existing_log(topic).start(topic, partition)

    async def end(self, topic: str, partition: int) -> int:
        return await self._existing_log(topic).end(topic, partition)

    async def truncate(self, topic: str, partition: int, *, before: int) -> None:
        await self._existing_log(topic).truncate(topic, partition, before=before)

    async def wait(self, topic: str, partition: int, *, offset: int, timeout_s: float | None = None) -> bool:
        return await self._existing_log(topic).wait(topic, partition, offset=offset, timeout_s=timeout_s)


class LazyStore(_LazyAdapter[SqliteStore]):
    """Implement `tidebook.store.port.StoreWriter` over a folder that may not exist yet."""

    deletes_topics = True

    async def pointer(self, topic: str, partition: int) -> Pointer | None:
        store = self.open_existing()
        return None if store is None else await store.pointer(topic, partition)

    async def head(self, key: Key) -> Head | None:
        store = self.open_existing()
        return None if store is None else await store.head(key)

    async def heads(self, topic: str, ids: Sequence[str]) -> Mapping[str, Head]:
        store = self.open_existing()
        return {} if store is None else await store.heads(topic, ids)

    async def events(self, key: Key, head: Head, *, after: int, to: int, limit: int) -> Sequence[EventRow]:
        store = self.open_existing()
        return () if store is None else await store.events(key, head, after=after, to=to, limit=limit)

    def ids(self, topic: str) -> AsyncIterator[str]:
        store = self.open_existing()
        return _empty() if store is None else store.ids(topic)

    async def snapshots(self, key: Key, incarnation: Position) -> Sequence[StoredSnapshot]:
        store = self.open_existing()
        return () if store is None else await store.snapshots(key, incarnation)

    async def topic_config(self, topic: str) -> TopicConfig | None:
        store = self.open_existing()
        return None if store is None else await store.topic_config(topic)

    async def topics(self) -> Sequence[str]:
        store = self.open_existing()
        return () if store is None else await store.topics()

    async def wait(self, topic: str, partition: int, *, beyond: Position | None, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while (store := self.open_existing()) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            await asyncio.sleep(min(left_s, POLL_INTERVAL_S))
        return await store.wait(topic, partition, beyond=beyond, timeout_s=max(0.0, deadline - time.monotonic()))

    async def tag_rows(
        self, tag: str, *, after: TagPosition | None, from_ms: int, until_ms: int, limit: int
    ) -> Sequence[TagRow]:
        store = self.open_existing()
        if store is None:
            return ()
        return await store.tag_rows(tag, after=after, from_ms=from_ms, until_ms=until_ms, limit=limit)

    def tags(self) -> AsyncIterator[str]:
        store = self.open_existing()
        return _empty() if store is None else store.tags()

    async def pointers(self, topic: str) -> Mapping[int, Pointer]:
        store = self.open_existing()
        return {} if store is None else await store.pointers(topic)

    async def wait_any(self, *, timeout_s: float, since: int = -1) -> int:
        store = self.open_existing()
        if store is not None:
            return await store.wait_any(timeout_s=timeout_s, since=since)
        await asyncio.sleep(min(timeout_s, POLL_INTERVAL_S))
        return -1

    async def splits(self, topic: str, *, count: int) -> Sequence[ScanSplit]:
        store = self.open_existing()
        return () if store is None else await store.splits(topic, count=count)

    def heads_in(self, topic: str, split: ScanSplit) -> AsyncIterator[Sequence[tuple[str, Head]]]:
        store = self.open_existing()
        return _empty() if store is None else store.heads_in(topic, split)

    def events_in(self, topic: str, split: ScanSplit) -> AsyncIterator[Sequence[tuple[str, EventRow]]]:
        store = self.open_existing()
        return _empty() if store is None else store.events_in(topic, split)

    def inspect(self, topic: str, split: ScanSplit) -> AsyncIterator[Sequence[tuple[str, Head | EventRow | Damage]]]:
        store = self.open_existing()
        return _empty() if store is None else store.inspect(topic, split)

    async def inspect_tag(
        self, tag: str, *, after: TagPosition | None, from_ms: int, until_ms: int, limit: int
    ) -> Sequence[TagRow | Damage]:
        store = self.open_existing()
        if store is None:
            return ()
        return await store.inspect_tag(tag, after=after, from_ms=from_ms, until_ms=until_ms, limit=limit)

    async def apply(self, writes: SliceWrites) -> None:
        await self.open_or_create().apply(writes)

    async def repair(self, repair: Repair) -> None:
        await self.open_or_create().repair(repair)

    async def save_snapshot(self, key: Key, incarnation: Position, snapshot: StoredSnapshot, *, slots: int) -> None:
        await self.open_or_create().save_snapshot(key, incarnation, snapshot, slots=slots)

    async def delete_snapshots(self, key: Key, incarnation: Position, *, to: int) -> None:
        store = self.open_existing()
        if store is not None:
            await store.delete_snapshots(key, incarnation, to=to)

    async def set_topic_config(self, topic: str, config: TopicConfig, *, expected: TopicConfig | None) -> TopicConfig:
        return await self.open_or_create().set_topic_config(topic, config, expected=expected)

    async def delete_topic(self, topic: str) -> None:
        store = self.open_existing()
        if store is not None:
            await store.delete_topic(topic)

    async def setting(self, name: str) -> str | None:
        store = self.open_existing()
        return None if store is None else await store.setting(name)

    async def set_setting(self, name: str, value: str, *, expected: str | None) -> bool:
        return await self.open_or_create().set_setting(name, value, expected=expected)

    def expired(self, topic: str, *, now_ms: int) -> AsyncIterator[tuple[str, Head]]:
        store = self.open_existing()
        return _empty() if store is None else store.expired(topic, now_ms=now_ms)

    def graves(self, topic: str) -> AsyncIterator[tuple[str, Head]]:
        store = self.open_existing()
        return _empty() if store is None else store.graves(topic)

    async def remove_graves(self, topic: str, graves: Sequence[tuple[str, Head]]) -> None:
        if (store := self.open_existing()) is not None:
            await store.remove_graves(topic, graves)

    def parked(self, topic: str | None = None) -> AsyncIterator[Parked]:
        store = self.open_existing()
        return _empty() if store is None else store.parked(topic)

    async def unpark(self, parked: Iterable[Parked]) -> None:
        store = self.open_existing()
        if store is not None:
            await store.unpark(parked)


async def _empty() -> AsyncIterator[Item]:
    return
    yield
