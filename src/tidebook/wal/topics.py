"""The data topic and the meta topic of a region: recover its state from them, follow them, and claim the region."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Final, NewType, TypeVar

from tidebook.core.errors import Fenced, InvalidInput, LogLost, NotFound, OutcomeUnknown, Unavailable
from tidebook.log.port import Acknowledged, Log, Outgoing, RecordPage, ends_early
from tidebook.wal.meta import RegionMeta, Verdict, fold
from tidebook.wal.record import (
    Control,
    DamagedWalRecord,
    DataRecord,
    OwnerClaim,
    encode_control,
    read_record,
    whole_number,
)
from tidebook.wal.settings import WalSettings
from tidebook.wal.snapshot import (
    RegionSnapshot,
    StoredSnapshotChunks,
    check_complete,
    collect_snapshots,
    encode_snapshot,
    plan_recovery,
    restore_meta,
)

#: Called for each record that a scan folds, with its offset and the fold's verdict.
OnRecord = Callable[[int, DataRecord | DamagedWalRecord, Verdict], None]

#: Each topic of a region has one partition.
PARTITION: Final = 0
#: How often a recovery or a read restarts because a cleaner truncated the log meanwhile.
RECOVERY_ATTEMPTS_MAX = 100

NAMESPACE_LENGTH_MAX: Final = 150
_NAMESPACE = re.compile(rf"[A-Za-z0-9._-]{{1,{NAMESPACE_LENGTH_MAX}}}")
_DATA_TOPIC = re.compile(r"wal\.(?P<namespace>.+)\.(?P<region>0|[1-9][0-9]*)\.data")
_TOPIC = re.compile(r"wal\.(?P<namespace>.+)\.[0-9]+\.(?:data|meta)")

RegionId = NewType("RegionId", int)
T = TypeVar("T")


def namespace_name(value: object) -> str:
    """Return a valid namespace, else raise `InvalidInput`; every log allows these characters in a topic name."""
    if type(value) is not str:
        raise InvalidInput(f"a namespace must be a string, not {type(value).__name__}")
    if not _NAMESPACE.fullmatch(value):
        raise InvalidInput(
            f"namespace {value[:80]!r} must have 1 to {NAMESPACE_LENGTH_MAX} characters of A-Z a-z 0-9 . _ -"
        )
    return value


def region_id(value: object) -> RegionId:
    """Return a valid region id, else raise `InvalidInput`."""
    return RegionId(whole_number(value, "a region's id"))


def region_of(topic: str, namespace: str) -> RegionId | None:
    """Return the region whose data topic this is; None if it is not a data topic of the namespace."""
    found = _DATA_TOPIC.fullmatch(topic)
    if found is None or found["namespace"] != namespace:
        return None
    return RegionId(int(found["region"]))


def namespace_of(topic: str) -> str | None:
    """Return the namespace whose region has this data or meta topic; None for any other topic."""
    found = _TOPIC.fullmatch(topic)
    return None if found is None else found["namespace"]


class RegionTopics:
    """The data topic (records) and the meta topic (snapshots) of a region, with one partition each."""

    def __init__(self, log: Log, namespace: str, region: RegionId, settings: WalSettings) -> None:
        self.log = log
        self.settings = settings
        self.namespace = namespace
        self.region = region
        self.data = f"wal.{namespace}.{region}.data"
        self.meta = f"wal.{namespace}.{region}.meta"
        #: The id of the data topic, set when the region is opened; a topic created again has another id.
        self.topic_id = ""

    async def find_id(self) -> str | None:
        """Return the current id of the data topic; None if the region does not exist."""
        state = await self.log.topic(self.data)
        return None if state is None else state.topic_id

    async def check_incarnation(self) -> None:
        """Raise `NotFound` if the data topic was deleted and created again: its offsets have another meaning."""
        if await self.find_id() not in (None, self.topic_id):
            raise NotFound(f"{self.data}: the region was deleted and created again: open it again")

    async def create(self) -> None:
        """Create both topics, or check existing ones; the data topic last, because the region exists once it does."""
        for topic in (self.meta, self.data):
            created = await self.log.create_topic(topic, 1, limit_bytes=self.settings.limit_bytes, keep_forever=True)
            if created.partitions != 1:
                raise InvalidInput(
                    f"topic {topic} has {created.partitions} partitions: a region's topics have one each"
                )
            self.topic_id = created.topic_id

    async def start(self) -> int:
        """Return the first retained offset of the data topic."""
        return await self.log.start(self.data, PARTITION)

    async def end(self) -> int:
        """Return the offset of the data topic's next record."""
        return await self.log.end(self.data, PARTITION)

    async def read(self, *, start: int, stop: int, limit: int = 1000) -> RecordPage:
        """Return up to `limit` records of the data topic from `start` on, below `stop`.

        The topic is known to have had records up to `stop`. Raise `Unavailable` if the log reports an earlier end,
        which may be outdated: without the records below `stop`, writes would be mistaken for absent.
        """
        return await self._read(self.data, start=start, stop=stop, limit=limit)

    async def _read(self, topic: str, *, start: int, stop: int, limit: int = 1000) -> RecordPage:
        page = await self.log.read(topic, PARTITION, start=start, stop=stop, limit=limit)
        if page.next_offset <= start < stop and not self.log.end_is_linearizable:
            raise ends_early(topic, PARTITION, start, stop - 1)
        return page

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

    async def append(self, record: OwnerClaim | Control) -> Acknowledged:
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
                batch = await self._read(self.meta, start=start, stop=end)
            except LogLost:  # a cleaner truncated it; the newer snapshots may be after the old end
                start = max(start + 1, await self.log.start(self.meta, PARTITION))
                end = await self.log.end(self.meta, PARTITION)
                continue
            records += [(record.offset, record.value) for record in batch.records]
            start = batch.next_offset
        return collect_snapshots(records)

    async def put_snapshot(self, snapshot: RegionSnapshot, *, snapshot_id: bytes) -> None:
        """Write a snapshot to the meta topic; return once it is acknowledged."""
        for value in encode_snapshot(snapshot, snapshot_id=snapshot_id, limit_bytes=self.settings.limit_bytes):
            await self.log.append(Outgoing(self.meta, PARTITION, None, value))

    async def truncate(self, *, data_before: int, meta_before: int) -> None:
        """Truncate the data topic, then the meta topic."""
        await self.log.truncate(self.data, PARTITION, before=data_before)
        await self.log.truncate(self.meta, PARTITION, before=meta_before)

    async def recover(self, *, on_record: OnRecord | None = None) -> RegionMeta:
        """Restore the newest snapshot and scan the records after it; raise `LogLost` with the range that is missing.

        A cleaner writes its snapshots before it truncates. Therefore the start of the log is read first: the snapshots
        read after it cover all that was truncated before it, and a gap between them is a loss.
        """
        for _ in range(RECOVERY_ATTEMPTS_MAX):
            start = await self.start()
            stored = await self.snapshots()
            end = await self.end()
            best = plan_recovery(stored, topic=self.data, topic_id=self.topic_id, log_start=start, log_end=end)
            meta = RegionMeta() if best is None else restore_meta(best)
            try:
                await self.scan(meta, stop=end, on_record=on_record)
            except LogLost:
                continue  # it was truncated during the scan
            check_complete(self.data, meta, start)
            return meta
        raise self.cleaned_too_often("recovered: open it again")

    async def follow(self, meta: RegionMeta, *, stop: int, on_record: OnRecord | None = None) -> None:
        """Fold the records from `meta.next_offset` up to `stop`; if a cleaner has truncated them, recover.

        A recovery changes `meta.restored_offset`: `on_record` then saw every record from that offset on, but may have
        missed earlier ones.
        """
        for _ in range(RECOVERY_ATTEMPTS_MAX):
            try:
                return await self.scan(meta, stop=stop, on_record=on_record)
            except LogLost as error:
                fresh = await self.recover(on_record=on_record)
                if fresh.next_offset <= meta.next_offset:
                    raise error
                meta.replace_with(fresh)
        raise self.cleaned_too_often("read: try again")

    def cleaned_too_often(self, operation: str) -> Unavailable:
        """Return the error for a read that cleaners have interrupted too often."""
        return Unavailable(f"{self.data}: cleaned {RECOVERY_ATTEMPTS_MAX} times in a row while it was {operation}")

    async def claim_region(self, meta: RegionMeta, writer: bytes) -> None:
        """Claim the next term for a writer and fold up to the claim; raise `Fenced` if other writers won every attempt.

        The state before the claim only determines the term; the owner continues from the state as of the claim.
        """
        for _ in range(self.settings.attempts_max):
            claim = OwnerClaim(meta.term + 1, writer)
            await self.append_claim(meta, claim)
            if (meta.term, meta.writer) == (claim.term, writer):
                return
        raise Fenced(
            f"{self.data}: another writer's claim came before each of {self.settings.attempts_max} claims in a row: "
            "does another process open the region repeatedly?"
        )

    async def append_claim(self, meta: RegionMeta, claim: OwnerClaim, *, on_record: OnRecord | None = None) -> None:
        """Append a claim and fold up to it. A duplicate has no effect, so it is safe to retry an unknown outcome."""
        sent = await self.retry(lambda: self.append(claim), when_unavailable=True)
        await self.follow(meta, stop=sent.offset + 1, on_record=on_record)

    async def retry(self, call: Callable[[], Awaitable[T]], *, when_unavailable: bool = False) -> T:
        """Return the result of a call that appends a record; retry it at once while its outcome is unknown.

        With `when_unavailable`, retry it also if nothing was written. Raise `OutcomeUnknown`, not `Unavailable`, once
        an attempt may have written the record.
        """
        unknown: OutcomeUnknown | None = None
        for left in reversed(range(self.settings.attempts_max)):
            try:
                return await call()
            except OutcomeUnknown as error:
                unknown = error
            except Unavailable as error:
                if not (when_unavailable and left):
                    if unknown is None:
                        raise
                    raise unknown from error
        assert unknown is not None
        raise unknown
