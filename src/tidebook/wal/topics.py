"""Access to the data topic and the meta topic of a region."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tidebook.core.errors import InvalidInput, LogLost, NotFound
from tidebook.log.port import Acknowledged, Log, Outgoing, RecordPage
from tidebook.wal.meta import RegionMeta, Verdict, fold
from tidebook.wal.names import RegionId
from tidebook.wal.record import (
    DamagedWalRecord,
    DataRecord,
    DropTable,
    MarkDeleted,
    OwnerClaim,
    encode_control,
    read_record,
)
from tidebook.wal.snapshot import RegionSnapshot, StoredSnapshotChunks, collect_snapshots, encode_snapshot

#: Called with each record that a scan folds: offset, record, verdict.
OnRecord = Callable[[int, DataRecord | DamagedWalRecord, Verdict], None]

#: Each topic of a region has one partition.
PARTITION: Final = 0


class RegionTopics:
    """The data topic (records) and the meta topic (snapshots) of a region, with one partition each."""

    def __init__(self, log: Log, namespace: str, region: RegionId, *, limit_bytes: int) -> None:
        self.log = log
        self.limit_bytes = limit_bytes
        self.data = f"wal.{namespace}.{region}.data"
        self.meta = f"wal.{namespace}.{region}.meta"
        #: The id of the data topic, set when the region is opened; a topic created again has another id.
        self.topic_id = ""

    async def find_id(self) -> str | None:
        """Return the current id of the data topic; None if the region does not exist."""
        state = await self.log.topic(self.data)
        return None if state is None else state.topic_id

    async def check_incarnation(self) -> None:
        """Raise `NotFound` if the data topic was deleted and created again: its offsets would be mistaken for ours."""
        if await self.find_id() not in (None, self.topic_id):
            raise NotFound(f"{self.data}: the region was deleted and made again: open it again")

    async def create(self) -> None:
        """Create both topics, or check them if they exist. The data topic is last: the region exists when it does."""
        for topic in (self.meta, self.data):
            made = await self.log.create_topic(topic, 1, limit_bytes=self.limit_bytes, keep_forever=True)
            if made.partitions != 1:
                raise InvalidInput(f"topic {topic} has {made.partitions} partitions: a region's topics have one each")
            self.topic_id = made.topic_id

    async def start(self) -> int:
        """Return the first retained offset of the data topic."""
        return await self.log.start(self.data, PARTITION)

    async def end(self) -> int:
        """Return the offset of the data topic's next record."""
        return await self.log.end(self.data, PARTITION)

    async def read(self, *, start: int, stop: int, limit: int = 1000) -> RecordPage:
        """Return up to `limit` records of the data topic, and the offset to continue from."""
        return await self.log.read(self.data, PARTITION, start=start, stop=stop, limit=limit)

    async def scan(self, meta: RegionMeta, *, stop: int, on_record: OnRecord | None = None) -> None:
        """Fold the records from `meta.next_offset` up to `stop` into `meta`; raise `LogLost` if they were truncated."""
        while meta.next_offset < stop:
            page = await self.read(start=meta.next_offset, stop=stop)
            for stored in page.records:
                record = read_record(stored.value)
                verdict = fold(meta, stored.offset, len(stored.value or b""), record)
                if on_record is not None:
                    on_record(stored.offset, record, verdict)
            if page.next_offset <= meta.next_offset and not page.records:
                return  # the log ends before `stop`
            meta.next_offset = max(meta.next_offset, page.next_offset)

    async def append(self, record: OwnerClaim | MarkDeleted | DropTable) -> Acknowledged:
        """Append a control record to the data topic."""
        return await self.log.append(Outgoing(self.data, PARTITION, None, encode_control(record)))

    async def snapshots(self) -> list[StoredSnapshotChunks]:
        """Return the complete snapshots of the meta topic."""
        try:
            start = await self.log.start(self.meta, PARTITION)
            end = await self.log.end(self.meta, PARTITION)
        except NotFound:  # an operator deleted it: the same as an empty topic
            return []
        records: list[tuple[int, bytes | None]] = []
        while start < end:
            try:
                batch = await self.log.read(self.meta, PARTITION, start=start, stop=end)
            except LogLost:  # a cleaner truncated it; the snapshots it relies on may be after the old end
                start = max(start + 1, await self.log.start(self.meta, PARTITION))
                end = await self.log.end(self.meta, PARTITION)
                continue
            records += [(record.offset, record.value) for record in batch.records]
            start = batch.next_offset
        return collect_snapshots(records)

    async def put_snapshot(self, snapshot: RegionSnapshot, *, snapshot_id: bytes) -> None:
        """Write a snapshot to the meta topic; return once it is acknowledged."""
        for value in encode_snapshot(snapshot, snapshot_id=snapshot_id, limit_bytes=self.limit_bytes):
            await self.log.append(Outgoing(self.meta, PARTITION, None, value))

    async def truncate(self, *, data_before: int, meta_before: int) -> None:
        """Truncate the data topic, then the meta topic."""
        await self.log.truncate(self.data, PARTITION, before=data_before)
        await self.log.truncate(self.meta, PARTITION, before=meta_before)
