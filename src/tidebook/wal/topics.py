"""The two topics of a region, and what is read from and written to them as a whole."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tidebook.core.errors import InvalidInput, LogLost, NotFound
from tidebook.log.port import Log, Outgoing, Record, Sent, TopicState
from tidebook.wal.meta import RegionMeta, Verdict, fold
from tidebook.wal.names import RegionId, data_topic, meta_topic
from tidebook.wal.record import Claim, Damaged, DataRecord, Drop, Mark, encode_control, read_record
from tidebook.wal.recovery import Lost
from tidebook.wal.snapshot import Gathered, Snapshot, encode_snapshot, gather_snapshots

#: Told of each record that a scan folds: offset, record, verdict.
OnRecord = Callable[[int, DataRecord | Damaged, Verdict], None]

_PARTITION = 0


class Bounds(msgspec.Struct, frozen=True):
    """The first offset that the data topic still holds, and the one that its next record gets."""

    start: int
    end: int


class RegionTopics:
    """A region's data and meta topic, one partition each."""

    def __init__(self, log: Log, namespace: str, region: RegionId, *, limit_bytes: int) -> None:
        self.log = log
        self.limit_bytes = limit_bytes
        self.data = data_topic(namespace, region)
        self.meta = meta_topic(namespace, region)
        #: The life of the data topic, known once it was found or made.
        self.topic_id = ""

    async def find(self) -> bool:
        """Whether the region is there."""
        state = await self.log.topic(self.data)
        if state is None:
            return False
        self.topic_id = state.topic_id
        return True

    async def is_same(self) -> bool:
        """Whether the data topic is still the one that was found: offsets of another life mean nothing here."""
        state = await self.log.topic(self.data)
        return state is not None and state.topic_id == self.topic_id

    async def check_life(self) -> None:
        """Raise NotFound where the data topic was deleted and made again: its offsets would be taken for ours."""
        state = await self.log.topic(self.data)
        if state is not None and state.topic_id != self.topic_id:
            raise NotFound(f"{self.data}: the region was deleted and made again: open it again")

    async def create(self) -> None:
        """Make both topics, or find and check them. The data topic comes last: with it the region is there."""
        await self._create(self.meta)
        self.topic_id = (await self._create(self.data)).topic_id

    async def _create(self, topic: str) -> TopicState:
        made = await self.log.create_topic(topic, 1, limit_bytes=self.limit_bytes, keep_forever=True)
        if made.partitions != 1:
            raise InvalidInput(f"topic {topic} has {made.partitions} partitions: a region's topics have one each")
        return made

    async def bounds(self) -> Bounds:
        """Where the data topic begins and ends now."""
        return Bounds(await self.start(), await self.end())

    async def start(self) -> int:
        """The first offset that the data topic still holds."""
        return await self.log.start(self.data, _PARTITION)

    async def end(self) -> int:
        """The offset that the data topic's next record gets."""
        return await self.log.end(self.data, _PARTITION)

    async def read(self, *, start: int, stop: int, limit: int = 1000) -> tuple[tuple[Record, ...], int]:
        """Records of the data topic, and where to go on."""
        batch = await self.log.read(self.data, _PARTITION, start=start, stop=stop, limit=limit)
        return batch.records, batch.next_offset

    async def scan(self, meta: RegionMeta, *, stop: int, on_record: OnRecord | None = None) -> None:
        """Fold the data topic's records from where the meta stands up to `stop`."""
        while meta.next_offset < stop:
            records, next_offset = await self.read(start=meta.next_offset, stop=stop)
            for held in records:
                record = read_record(held.value)
                verdict = fold(meta, held.offset, len(held.value or b""), record)
                if on_record is not None:
                    on_record(held.offset, record, verdict)
            if next_offset <= meta.next_offset and not records:
                return  # the log ends before `stop`
            meta.next_offset = max(meta.next_offset, next_offset)

    def outgoing(self, value: bytes) -> Outgoing:
        """A record on its way to the data topic."""
        return Outgoing(self.data, _PARTITION, None, value)

    async def append(self, record: Claim | Mark | Drop) -> Sent:
        """Put a control record into the data topic."""
        return await self.log.append(self.outgoing(encode_control(record)))

    async def snapshots(self) -> Gathered:
        """The good snapshots of the meta topic."""
        try:
            start = await self.log.start(self.meta, _PARTITION)
            end = await self.log.end(self.meta, _PARTITION)
        except NotFound:  # removed by hand: as good as empty
            return Gathered((), 0)
        held: list[tuple[int, bytes | None]] = []
        while start < end:
            try:
                batch = await self.log.read(self.meta, _PARTITION, start=start, stop=end)
            except LogLost:  # a cleaner was quicker, and what it relies on may lie behind the end of before
                start = max(start + 1, await self.log.start(self.meta, _PARTITION))
                end = await self.log.end(self.meta, _PARTITION)
                continue
            held += [(record.offset, record.value) for record in batch.records]
            start = batch.next_offset
        return gather_snapshots(held)

    async def put_snapshot(self, snapshot: Snapshot, *, snapshot_id: bytes) -> int:
        """Write a snapshot, acknowledged; the bytes that it took."""
        values = encode_snapshot(snapshot, snapshot_id=snapshot_id, limit_bytes=self.limit_bytes)
        for value in values:
            await self.log.append(Outgoing(self.meta, _PARTITION, None, value))
        return sum(map(len, values))

    async def cut(self, *, data_before: int, meta_before: int) -> None:
        """Remove records, then old snapshots."""
        await self.log.truncate(self.data, _PARTITION, before=data_before)
        await self.log.truncate(self.meta, _PARTITION, before=meta_before)

    def lost(self, lost: Lost) -> LogLost:
        """The loss as an error."""
        return LogLost(
            topic=self.data,
            partition=_PARTITION,
            first=lost.first,
            last=lost.last,
            remedy=lost.remedy,
            when="while they were needed",
        )
