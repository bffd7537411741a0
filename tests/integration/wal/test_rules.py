"""The correctness rules of a write-ahead log, each with the history that breaks an implementation without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.integration.wal.base import contents, held_records, make_wal, state_of
from tests.integration.wal.faulty import FaultyLog
from tidebook.core.errors import Fenced, LogLost, OutcomeUnknown, TooLarge, Unavailable
from tidebook.log.port import Outgoing
from tidebook.wal.record import (
    DropTable,
    MarkDeleted,
    OwnerClaim,
    Write,
    encode_control,
    encode_write,
    pack_payloads,
    read_record,
)
from tidebook.wal.region import Region
from tidebook.wal.wal import Wal

DATA, META = "wal.rules.7.data", "wal.rules.7.meta"


@pytest_asyncio.fixture
async def wal(log: FaultyLog) -> AsyncIterator[Wal]:
    wal = make_wal(log, "rules")
    yield wal
    await wal.close()


@pytest_asyncio.fixture
async def region(wal: Wal) -> Region:
    return await wal.open_region(7, create=True)


@pytest_asyncio.fixture
async def other(log: FaultyLog, wal: Wal) -> AsyncIterator[Wal]:
    other = make_wal(log, "rules")
    yield other
    await other.close()


def once(log: FaultyLog, kind: str, *, of: type = Write) -> None:
    """Inject a fault into the next record of a type."""
    left = [kind]

    def fault(record: Outgoing) -> str | None:
        return left.pop() if left and record.topic == DATA and isinstance(read_record(record.value), of) else None

    log.fault = fault


# 36: Claim first, then recover up to the claim


async def test_rule_36_a_write_between_recovery_and_claim_is_not_numbered_twice(
    log: FaultyLog, other: Wal, region: Region
) -> None:
    await region.write(1, [b"34"])

    slow = asyncio.Event()
    release = asyncio.Event()
    append = log.append

    async def append_claim_late(record: Outgoing):  # type: ignore[no-untyped-def]
        if isinstance(read_record(record.value), OwnerClaim):
            slow.set()
            await release.wait()
        return await append(record)

    log.append = append_claim_late  # type: ignore[method-assign]
    opening = asyncio.create_task(other.open_region(7))
    await slow.wait()
    await region.write(1, [b"35"])  # by the old owner, between the recovery and the claim
    release.set()
    second = await opening
    assert (await second.write(1, [b"36"])).first == 3
    assert await contents(second) == {1: [(1, b"34"), (2, b"35"), (3, b"36")]}


async def test_rule_36_a_claim_is_valid_only_above_the_current_term(log: FaultyLog, other: Wal, region: Region) -> None:
    await region.write(1, [b"a"])
    await log.append(Outgoing(DATA, 0, None, encode_control(OwnerClaim(region.meta.term, b"z" * 16))))
    await region.write(1, [b"b"])
    assert await contents(region) == {1: [(1, b"a"), (2, b"b")]}


async def test_rule_36_a_record_that_does_not_match_the_claim_in_force_is_ignored(
    log: FaultyLog, other: Wal, region: Region
) -> None:
    await region.write(1, [b"a"])
    for term, writer in [(region.meta.term, b"z" * 16), (region.meta.term + 1, region.meta.writer)]:
        forged = encode_write(term, writer, [(2, pack_payloads(1, [b"forged"]))])[1]
        await log.append(Outgoing(DATA, 0, None, forged))
    await region.write(1, [b"b"])
    assert await contents(await other.open_region(7)) == {1: [(1, b"a"), (2, b"b")]}


async def test_rule_36_a_claim_that_may_be_written_is_not_reported_as_unavailable(
    log: FaultyLog, region: Region, other: Wal
) -> None:
    """Unavailable would mean that nothing was changed, but the first attempt has fenced the owner."""
    kinds = ["refused", "refused", "unknown"]
    log.fault = lambda record: kinds.pop() if kinds and isinstance(read_record(record.value), OwnerClaim) else None
    with pytest.raises(OutcomeUnknown):
        await other.open_region(7)
    assert kinds == []
    with pytest.raises(Fenced):
        await region.write(1, [b"a"])


# 37: A fenced writer still gets acknowledgements


async def test_rule_37_contiguous_acknowledgements_are_enough(log: FaultyLog, region: Region) -> None:
    log.reads_fail = True
    for n in range(1, 20):
        assert (await region.write(1, [b"x"])).first == n
    log.reads_fail = False


async def test_rule_37_a_gap_is_read_before_a_write_is_resolved(log: FaultyLog, region: Region) -> None:
    await region.write(1, [b"a"])
    await log.append(Outgoing(DATA, 0, None, b"something foreign"))
    written = await region.write(1, [b"b"])
    assert (written.first, written.offset) == (2, 3)


async def test_rule_37_an_unreadable_gap_is_an_unknown_outcome_and_the_next_write_resolves_it(
    log: FaultyLog, region: Region
) -> None:
    await region.write(1, [b"a"])
    await log.append(Outgoing(DATA, 0, None, b"something foreign"))
    log.reads_fail = True
    with pytest.raises(OutcomeUnknown, match="acknowledged at offset 3"):
        await region.write(1, [b"b"])
    log.reads_fail = False
    assert (await region.write(1, [b"c"])).first == 3
    assert await contents(region) == {1: [(1, b"a"), (2, b"b"), (3, b"c")]}


@pytest.mark.parametrize("kind", ["unknown", "lost", "refused", "late", "twice"])
async def test_rule_37_every_write_is_written_once_under_every_fault(
    log: FaultyLog, region: Region, other: Wal, kind: str
) -> None:
    await region.write(1, [b"a"])
    once(log, kind)
    written = await asyncio.gather(*(region.write(table, [b"%d" % table]) for table in (1, 2, 3)))
    await log.land()
    assert [(w.first, w.last) for w in written] == [(2, 2), (1, 1), (1, 1)]
    await region.write(1, [b"z"])
    expected = {1: [(1, b"a"), (2, b"1"), (3, b"z")], 2: [(1, b"2")], 3: [(1, b"3")]}
    assert await contents(region) == expected
    again = await other.open_region(7)
    assert await contents(again) == expected


@pytest.mark.parametrize("kind", ["unknown", "lost", "refused", "late", "twice"])
@pytest.mark.parametrize("at", range(4))
async def test_rule_37_holds_in_a_full_pipeline(log: FaultyLog, other: Wal, kind: str, at: int) -> None:
    region = await make_wal(log, "rules", pack_bytes=1, in_flight_max=4).open_region(7, create=True)
    left = [None] * at + [kind]

    def fault(record: Outgoing) -> str | None:
        is_write = record.topic == DATA and isinstance(read_record(record.value), Write)
        return left.pop(0) if is_write and left else None

    log.fault = fault
    written = await asyncio.gather(*(region.write(n % 2, [b"%d" % n]) for n in range(8)))
    await log.land()
    again = await other.open_region(7)
    held = await contents(again)
    reported = {(n % 2, w.first): b"%d" % n for n, w in enumerate(written)}
    assert {(table, seq): payload for table, pairs in held.items() for seq, payload in pairs} == reported
    assert sorted(reported) == [(table, seq) for table in (0, 1) for seq in range(1, 5)]


async def test_rule_37_a_record_that_lands_after_the_new_claim_never_becomes_valid(
    log: FaultyLog, region: Region, other: Wal
) -> None:
    once(log, "late")
    written = await region.write(1, [b"once"])
    assert written.first == 1
    assert region.meta.term == 2
    await log.land()
    assert await contents(await other.open_region(7)) == {1: [(1, b"once")]}


async def test_rule_37_an_unavailable_log_is_reported_and_the_region_continues_later(
    log: FaultyLog, region: Region
) -> None:
    await region.write(1, [b"a"])
    log.fault = lambda _: "refused"
    with pytest.raises(Unavailable):
        await region.write(1, [b"b"])
    log.fault = lambda _: "lost"
    with pytest.raises((Unavailable, OutcomeUnknown)):
        await region.write(1, [b"c"])
    log.fault = lambda _: None
    assert (await region.write(1, [b"d"])).first == 2


async def test_rule_37_a_write_of_unknown_outcome_is_not_mistaken_for_its_successor(
    log: FaultyLog, region: Region
) -> None:
    await region.write(1, [b"a"])
    log.fault = lambda record: "late" if isinstance(read_record(record.value), Write) else "refused"
    with pytest.raises(OutcomeUnknown):
        await region.write(1, [b"unknown"])
    log.fault = lambda _: None
    log.late, late = [], log.late
    sending = asyncio.create_task(region.write(1, [b"successor"]))
    await sending
    for record in late:
        await log.append(record)  # it has the successor's number and the previous claim
    await region.write(1, [b"z"])
    assert await contents(region) == {1: [(1, b"a"), (2, b"successor"), (3, b"z")]}


async def test_rule_37_a_call_is_one_record_or_is_refused_as_too_large(log: FaultyLog) -> None:
    small = await make_wal(log, "rules", limit_bytes=2_000).open_region(7, create=True)
    with pytest.raises(TooLarge, match="2,000"):
        await small.write_many([(1, [b"x" * 1000]), (2, [b"y" * 1000])])
    before = len(await held_records(log, DATA))
    await small.write_many([(1, [b"x" * 500]), (2, [b"y" * 500])])
    assert len(await held_records(log, DATA)) == before + 1


async def test_rule_37_a_fenced_writer_learns_which_of_its_writes_are_valid(
    log: FaultyLog, region: Region, other: Wal
) -> None:
    once(log, "unknown")
    first = asyncio.create_task(region.write(1, [b"landed"]))
    await log.sends(Write)
    second = await other.open_region(7)
    try:
        await first
        assert (1, b"landed") in (await contents(second)).get(1, [])
    except Fenced:
        assert await contents(second) == {}
    with pytest.raises(Fenced):
        await region.write(1, [b"late"])


# 38: A snapshot is the fold of verified records


async def test_rule_38_a_snapshot_contains_no_unverified_acknowledgement(
    log: FaultyLog, region: Region, other: Wal
) -> None:
    await region.write(1, [b"a"])
    await other.open_region(7)
    with pytest.raises(Fenced):
        await region.write(1, [b"acknowledged, and void"])
    snapshot = await region.snapshot()
    assert [(t.table, t.mapping.stop) for t in snapshot.tables] == [(1, 2)]


async def test_rule_38_recovery_uses_the_snapshot_that_covers_most(log: FaultyLog, region: Region, other: Wal) -> None:
    await region.write(1, [b"a"])
    await region.snapshot()
    old = (await held_records(log, META))[0].value
    assert old is not None
    await asyncio.gather(*(region.write(1, [b"b"]) for _ in range(3)))
    await region.mark_deleted(1, 4)
    await region.clean()
    await log.append(Outgoing(META, 0, None, old))  # last in the topic, first in time
    assert state_of((await other.open_region(7)).meta) == state_of(region.meta)


async def test_rule_38_a_large_snapshot_is_chunked(log: FaultyLog, other: Wal) -> None:
    region = await make_wal(log, "rules", limit_bytes=1_000, pack_bytes=1).open_region(7, create=True)
    await asyncio.gather(*(region.write(table, [b"x"]) for table in range(200)))
    await region.snapshot()
    records = await held_records(log, META)
    assert len(records) > 3
    assert all(len(record.value or b"") <= 1_000 for record in records)
    assert state_of((await other.open_region(7)).meta) == state_of(region.meta)


async def test_rule_38_a_torn_large_snapshot_falls_back(log: FaultyLog, other: Wal) -> None:
    region = await make_wal(log, "rules", limit_bytes=1_000, pack_bytes=1).open_region(7, create=True)
    await asyncio.gather(*(region.write(table, [b"x"]) for table in range(200)))
    chunks = [0]

    def tear(record: Outgoing) -> str | None:
        chunks[0] += record.topic == META
        return "refused" if chunks[0] > 2 else None

    log.fault = tear
    with pytest.raises(Unavailable):
        await region.snapshot()
    log.fault = lambda _: None
    assert len(await held_records(log, META)) == 2
    assert state_of((await other.open_region(7)).meta) == state_of(region.meta)


# 39: Mark and Drop are control records in the data topic too


async def test_rule_39_falling_back_one_snapshot_does_not_restore_a_dropped_table(
    log: FaultyLog, region: Region, other: Wal
) -> None:
    await region.write_many([(1, [b"a"]), (2, [b"b", b"c"])])
    await region.snapshot()
    await region.mark_deleted(2, 2)
    log.fault = lambda record: "lost" if record.topic == META else None
    with pytest.raises(OutcomeUnknown):
        await region.drop_table(1)  # its snapshot never arrives
    log.fault = lambda _: None
    again = await other.open_region(7)
    assert await contents(again) == {2: [(2, b"c")]}


async def test_rule_39_a_drop_without_its_snapshot_is_not_reported_as_unavailable(
    log: FaultyLog, region: Region, other: Wal
) -> None:
    await region.write_many([(1, [b"a"]), (2, [b"b"])])
    log.fault = lambda record: "refused" if record.topic == META else None
    with pytest.raises(OutcomeUnknown):
        await region.drop_table(1)
    log.fault = lambda _: None
    assert await contents(await other.open_region(7)) == {2: [(1, b"b")]}


async def test_rule_39_marks_and_drops_fold_at_any_term(log: FaultyLog, region: Region, other: Wal) -> None:
    await region.write_many([(1, [b"a", b"b"]), (2, [b"c"])])
    incarnations = {table: held.incarnation for table, held in region.meta.tables.items()}
    second = await other.open_region(7)
    for record in (MarkDeleted(1, incarnations[1], 2), DropTable(2, incarnations[2])):
        await log.append(Outgoing(DATA, 0, None, encode_control(record)))
    await second.refresh()
    assert await contents(second) == {1: [(2, b"b")]}


@pytest.mark.parametrize("kind", ["unknown", "lost", "late"])
async def test_rule_39_a_mark_of_unknown_outcome_is_made_certain(
    log: FaultyLog, region: Region, other: Wal, kind: str
) -> None:
    await region.write(1, [b"a", b"b"])
    once(log, kind, of=MarkDeleted)
    await region.mark_deleted(1, 2)
    await log.land()
    assert await contents(await other.open_region(7)) == {1: [(2, b"b")]}


@pytest.mark.parametrize("kind", ["unknown", "lost", "late"])
@pytest.mark.parametrize("writable", [True, False])
async def test_rule_39_a_drop_of_unknown_outcome_is_made_certain(
    log: FaultyLog, wal: Wal, region: Region, other: Wal, kind: str, writable: bool
) -> None:
    await region.write_many([(1, [b"a"]), (2, [b"b"])])
    once(log, kind, of=DropTable)
    await (await wal.open_region(7, writable=writable)).drop_table(1)
    assert (await region.write(1, [b"new"])).first == 1
    await log.land()
    assert await contents(await other.open_region(7)) == {1: [(1, b"new")], 2: [(1, b"b")]}


@pytest.mark.parametrize("writable", [True, False])
async def test_rule_39_a_mark_that_may_be_written_is_not_reported_as_unavailable(
    log: FaultyLog, wal: Wal, region: Region, other: Wal, writable: bool
) -> None:
    """Unavailable would mean that nothing was changed, but the attempt before the refused one may have been written."""
    await region.write(1, [b"a", b"b"])
    marker = region if writable else await wal.open_region(7, writable=False)
    kinds = ["refused", "unknown"]
    log.fault = lambda record: kinds.pop() if kinds and isinstance(read_record(record.value), MarkDeleted) else None
    with pytest.raises(OutcomeUnknown):
        await marker.mark_deleted(1, 2)
    assert kinds == []
    log.fault = lambda record: "refused" if isinstance(read_record(record.value), MarkDeleted) else None
    with pytest.raises(Unavailable):
        await marker.mark_deleted(1, 3)
    log.fault = lambda _: None
    assert await contents(await other.open_region(7)) == {1: [(2, b"b")]}


async def test_rule_39_a_mark_that_cannot_be_read_back_is_not_reported_as_unavailable(
    log: FaultyLog, wal: Wal, region: Region, other: Wal
) -> None:
    await region.write(1, [b"a", b"b"])
    reader = await wal.open_region(7, writable=False)

    def fail_reads(record: Outgoing) -> None:
        log.reads_fail = True

    log.fault = fail_reads
    with pytest.raises(OutcomeUnknown):
        await reader.mark_deleted(1, 2)
    log.reads_fail = False
    log.fault = lambda _: None
    assert await contents(await other.open_region(7)) == {1: [(2, b"b")]}


async def test_rule_39_a_late_drop_does_not_drop_the_table_created_again(
    log: FaultyLog, region: Region, other: Wal
) -> None:
    await region.write(1, [b"old"])
    incarnation = region.meta.tables[1].incarnation
    await region.drop_table(1)
    await region.write(1, [b"new"])
    await log.append(Outgoing(DATA, 0, None, encode_control(DropTable(1, incarnation))))
    assert await contents(await other.open_region(7)) == {1: [(1, b"new")]}


# 40: DeleteRecords is not durable


async def test_rule_40_records_that_reappear_after_a_truncation_are_not_read(
    log: FaultyLog, region: Region, other: Wal, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(5):
        await region.write(1, [b"%d" % n])
    await region.mark_deleted(1, 6)

    async def forget(topic: str, partition: int, *, before: int) -> None:
        """Acknowledge a truncation that a power failure undoes."""

    monkeypatch.setattr(log, "truncate", forget, raising=False)
    await region.clean()
    monkeypatch.undo()
    assert await log.start(DATA, 0) == 0
    again = await other.open_region(7)
    assert await contents(again) == {}
    assert state_of(again.meta) == state_of(region.meta)
    assert again.meta.truncated_to > 0
    await again.clean()
    assert await log.start(DATA, 0) > 5


async def test_rule_40_the_log_is_truncated_at_most_to_the_older_snapshot(log: FaultyLog, region: Region) -> None:
    await region.write(1, [b"a"])
    await region.mark_deleted(1, 2)
    await region.clean()
    for _ in range(3):
        written = await region.write(1, [b"b"])
        await region.mark_deleted(1, written.last + 1)
        await region.clean()
        start = await log.start(DATA, 0)
        values = [record.value for record in await held_records(log, META)]
        for kept in range(len(values)):  # each value alone is sufficient for a recovery
            assert (await _recovered_with(log, values[kept])) == state_of(region.meta)
        assert start <= await log.end(DATA, 0)


async def _recovered_with(log: FaultyLog, value: bytes | None) -> dict[int, object]:
    """Return the state of a reader for which only this snapshot is usable."""
    only = FaultyLog(log)

    async def read(topic: str, partition: int, **named: int):  # type: ignore[no-untyped-def]
        batch = await log.read(topic, partition, **named)
        if topic != META:
            return batch
        return type(batch)(tuple(r for r in batch.records if r.value == value), batch.next_offset)

    only.read = read  # type: ignore[method-assign]
    region = await make_wal(only, "rules").open_region(7, writable=False)
    return dict(state_of(region.meta))


async def test_rule_40_a_log_start_past_what_recovery_needs_always_raises_log_lost(
    log: FaultyLog, region: Region, other: Wal
) -> None:
    await region.write(1, [b"a"])
    await region.write(2, [b"b"])
    await region.snapshot()
    await log.truncate(DATA, 0, before=await log.end(DATA, 0))
    for writable in (True, False):
        with pytest.raises(LogLost) as raised:
            await other.open_region(7, writable=writable)
        assert (raised.value.first, raised.value.last) == (1, 2)


# 41: mark_deleted takes up to next_seq_num


async def test_rule_41_the_last_entry_of_a_table_does_not_pin_the_log(log: FaultyLog, region: Region) -> None:
    first = await region.write(1, [b"a"])
    await region.mark_deleted(1, region.meta.tables[1].next_seq_num)
    cleaned = await region.clean()
    assert cleaned.truncated_to > first.offset
    assert cleaned.held_bytes == 0


async def test_rule_41_the_first_number_is_1_and_the_first_mark_is_0(region: Region) -> None:
    assert (await region.write(1, [b"a"])).first == 1
    assert region.meta.tables[1].latest_marked_deleted == 0
