"""Access to the data topic and the meta topic of a region."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tidebook.core.errors import InvalidInput, LogLost, NotFound
from tidebook.log.port import Acknowledged, Log, Outgoing, Record, TopicState
from tidebook.runtime.process import generation, refuse_fork
from tidebook.wal.meta import RegionMeta, Verdict, fold
from tidebook.wal.names import RegionId, data_topic, meta_topic
from tidebook.wal.record import (
    DamagedWalRecord,
    DataRecord,
    DropTable,
    MarkDeleted,
    OwnerClaim,
    encode_control,
    read_record,
)
from tidebook.wal.recovery import EntriesLost
from tidebook.wal.snapshot import CollectedSnapshots, RegionSnapshot, collect_snapshots, encode_snapshot

#: Called with each record that a scan folds: offset, record, verdict.
OnRecord = Callable[[int, DataRecord | DamagedWalRecord, Verdict], None]

_PARTITION = 0


class TopicBounds(msgspec.Struct, frozen=True):
    """The first retained offset of the data topic, and the offset of its next record."""

    start: int
    end: int


class RegionTopics:
    """The data topic (records) and the meta topic (snapshots) of a region, with one partition each."""

    def __init__(self, log: Log, namespace: str, region: RegionId, *, limit_bytes: int) -> None:
        self.log = log
        self.limit_bytes = limit_bytes
        self._generation = generation()
        self.data = data_topic(namespace, region)
        self.meta = meta_topic(namespace, region)
        #: The id of the data topic, set by `find` and `create`; a topic created again has another id.
        self.topic_id = ""

    def refuse_fork(self) -> None:
        """Raise `InvalidInput` in a forked child of the process that opened the region."""
        refuse_fork(self._generation, self.data)

    async def find(self) -> bool:
        """Return whether the region exists, and remember the id of its data topic."""
        state = await self.log.topic(self.data)
        if state is None:
            return False
        self.topic_id = state.topic_id
        return True

    async def is_same(self) -> bool:
        """Return whether the data topic still exists with the same id; offsets of another one mean nothing here."""
        state = await self.log.topic(self.data)
        return state is not None and state.topic_id == self.topic_id

    async def check_incarnation(self) -> None:
        """Raise `NotFound` if the data topic was deleted and created again: its offsets would be mistaken for ours."""
        state = await self.log.topic(self.data)
        if state is not None and state.topic_id != self.topic_id:
            raise NotFound(f"{self.data}: the region was deleted and made again: open it again")

    async def create(self) -> None:
        """Create both topics, or check them if they exist. The data topic is last: the region exists when it does."""
        await self._create(self.meta)
        self.topic_id = (await self._create(self.data)).topic_id

    async def _create(self, topic: str) -> TopicState:
        made = await self.log.create_topic(topic, 1, limit_bytes=self.limit_bytes, keep_forever=True)
        if made.partitions != 1:
            raise InvalidInput(f"topic {topic} has {made.partitions} partitions: a region's topics have one each")
        return made

    async def bounds(self) -> TopicBounds:
        """Return the current bounds of the data topic."""
        return TopicBounds(await self.start(), await self.end())

    async def start(self) -> int:
        """Return the first retained offset of the data topic."""
        return await self.log.start(self.data, _PARTITION)

    async def end(self) -> int:
        """Return the offset of the data topic's next record."""
        return await self.log.end(self.data, _PARTITION)

    async def read(self, *, start: int, stop: int, limit: int = 1000) -> tuple[tuple[Record, ...], int]:
        """Return up to `limit` records of the data topic, and the offset to continue from."""
        batch = await self.log.read(self.data, _PARTITION, start=start, stop=stop, limit=limit)
        return batch.records, batch.next_offset

    async def scan(self, meta: RegionMeta, *, stop: int, on_record: OnRecord | None = None) -> None:
        """Fold the records from `meta.next_offset` up to `stop` into `meta`; raise `LogLost` if they were truncated."""
        while meta.next_offset < stop:
            records, next_offset = await self.read(start=meta.next_offset, stop=stop)
            for stored in records:
                record = read_record(stored.value)
                verdict = fold(meta, stored.offset, len(stored.value or b""), record)
                if on_record is not None:
                    on_record(stored.offset, record, verdict)
            if next_offset <= meta.next_offset and not records:
                return  # the log ends before `stop`
            meta.next_offset = max(meta.next_offset, next_offset)

    def outgoing(self, value: bytes) -> Outgoing:
        """Return a record for the data topic, to be sent."""
        return Outgoing(self.data, _PARTITION, None, value)

    async def append(self, record: OwnerClaim | MarkDeleted | DropTable) -> Acknowledged:
        """Append a control record to the data topic."""
        return await self.log.append(self.outgoing(encode_control(record)))

    async def snapshots(self) -> CollectedSnapshots:
        """Return the complete snapshots of the meta topic."""
        try:
            start = await self.log.start(self.meta, _PARTITION)
            end = await self.log.end(self.meta, _PARTITION)
        except NotFound:  # an operator deleted it: the same as an empty topic
            return CollectedSnapshots((), 0)
        records: list[tuple[int, bytes | None]] = []
        while start < end:
            try:
                batch = await self.log.read(self.meta, _PARTITION, start=start, stop=end)
            except LogLost:  # a cleaner truncated it; the snapshots it relies on may be after the old end
                start = max(start + 1, await self.log.start(self.meta, _PARTITION))
                end = await self.log.end(self.meta, _PARTITION)
                continue
            records += [(record.offset, record.value) for record in batch.records]
            start = batch.next_offset
        return collect_snapshots(records)

    async def put_snapshot(self, snapshot: RegionSnapshot, *, snapshot_id: bytes) -> int:
        """Write a snapshot to the meta topic and return its size in bytes, once acknowledged."""
        values = encode_snapshot(snapshot, snapshot_id=snapshot_id, limit_bytes=self.limit_bytes)
        for value in values:
            await self.log.append(Outgoing(self.meta, _PARTITION, None, value))
        return sum(map(len, values))

    async def truncate(self, *, data_before: int, meta_before: int) -> None:
        """Truncate the data topic, then the meta topic."""
        await self.log.truncate(self.data, _PARTITION, before=data_before)
        await self.log.truncate(self.meta, _PARTITION, before=meta_before)

    def lost_error(self, lost: EntriesLost) -> LogLost:
        """Return the loss as an error."""
        return LogLost(
            topic=self.data,
            partition=_PARTITION,
            first=lost.first,
            last=lost.last,
            remedy=lost.remedy,
            when="while they were needed",
        )
