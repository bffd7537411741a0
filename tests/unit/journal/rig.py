"""A journal whose log and store are embedded, with faults in front of both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from tidebook.core.action import Action
from tidebook.core.event import Event
from tidebook.core.record import encode_record
from tidebook.journal.journal import Journal
from tidebook.journal.outcome import Appended
from tidebook.journal.settings import JournalSettings
from tidebook.log.port import Acknowledged, Log, Outgoing
from tidebook.log.sqlite import SqliteLog
from tidebook.runtime.clock import RandomIds
from tidebook.runtime.metrics import Metrics
from tidebook.store.port import StoreWriter
from tidebook.store.sqlite import SqliteStore
from tidebook.testing.clock import ManualClock
from tidebook.testing.faults import Faults
from tidebook.testing.replicating import replicate

Kind = Literal["indexed", "like kafka"]
TOPIC = "orders"


class Rig:
    """The view of one partition that one process has."""

    def __init__(self, folder: Path, kind: Kind, **settings: Any) -> None:
        self.kind = kind
        self.metrics = Metrics()
        self.clock = ManualClock()
        self.log_faults, self.store_faults = Faults(), Faults()
        indexed = kind == "indexed"
        #: Where the first record of a journal is: on a log like Kafka's a mark precedes it.
        self.first_offset = 0 if indexed else 1
        self._log = SqliteLog(folder, clock=self.clock, indexed_by_key=indexed, end_is_linearizable=indexed)
        self._store = SqliteStore(folder)
        self.log: Log = self.log_faults.around(self._log)
        self.store: StoreWriter = self.store_faults.around(self._store)
        self.settings = JournalSettings(**{"partitions": 1, "segment_size": 5, "page_events": 2, **settings})
        self.journal = Journal(
            TOPIC,
            log=self.log,
            store=self.store,
            clock=self.clock,
            ids=RandomIds(),
            settings=self.settings,
            metrics=self.metrics,
        )

    async def append(self, id: str, *payloads: Any, **how: Any) -> Appended:
        return await self.journal.append(id, [Event(payload) for payload in payloads], **how)

    async def read(self, id: str, **how: Any) -> list[Any]:
        return [event.payload async for event in self.journal.read(id, **how)]

    async def write(self, id: str | None, action: Action) -> Acknowledged:
        """A record as another writer would send it."""
        return await self.write_raw(None if id is None else id.encode(), encode_record(action, limit_bytes=10**9))

    async def write_raw(self, key: bytes | None, value: bytes) -> Acknowledged:
        await self.journal.create()
        return await self._log.append(Outgoing(TOPIC, 0, key, value))

    async def make_topic(self) -> None:
        """Create the topic before any journal is opened, so that its limit is that of the log."""
        await self._log.create_topic(TOPIC, self.settings.partitions)

    async def replicate(self, *, batch_records: int = 1000, batches_max: int | None = None) -> None:
        await replicate(self._log, self._store, TOPIC, batch_records=batch_records, batches_max=batches_max)

    async def truncate(self) -> None:
        """Truncate the whole log, as retention does."""
        await self._log.truncate(TOPIC, 0, before=await self._log.end(TOPIC, 0))

    async def close(self) -> None:
        self.log_faults.heal()
        self.store_faults.heal()
        await self.journal.close()
        await self._store.close()
        await self._log.close()


def numbers(read: Sequence[Any]) -> list[int]:
    return [event.seq_nr for event in read]
