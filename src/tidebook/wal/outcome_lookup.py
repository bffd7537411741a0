"""Determine the outcome of in-flight records in a truncated part of the log, from the mappings of their tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tidebook.core.errors import LogLost, OutcomeUnknown
from tidebook.log.port import Acknowledged
from tidebook.wal.in_flight import InFlightRecord, ScanResult
from tidebook.wal.meta import RegionMeta, TableMeta
from tidebook.wal.record import Write, read_record
from tidebook.wal.topics import RegionTopics


def incarnations_of(meta: RegionMeta, in_flight: Iterable[InFlightRecord]) -> dict[int, int]:
    """Return the current incarnation of the first table of each in-flight write."""
    tables = {flight.record.parts[0].table for flight in in_flight if isinstance(flight.record, Write)}
    return {table: meta.tables[table].incarnation for table in tables if table in meta.tables}


async def look_up_outcomes(
    topics: RegionTopics,
    meta: RegionMeta,
    in_flight: Iterable[InFlightRecord],
    scan: ScanResult,
    *,
    incarnations: Mapping[int, int],
    writer: bytes,
) -> dict[InFlightRecord, OutcomeUnknown]:
    """Add to `scan` the valid records that it may have missed; return those whose outcome cannot be determined.

    `incarnations` are the tables' incarnations before the scan: numbers of another incarnation prove nothing.
    """
    unknown: dict[InFlightRecord, OutcomeUnknown] = {}
    incarnations = dict(incarnations)
    for flight in in_flight:
        if not isinstance(flight.record, Write):
            continue
        part = flight.record.parts[0]
        table_meta = meta.tables.get(part.table)
        known = True
        if scan.may_have_missed(flight):
            if table_meta is not None and table_meta.incarnation == incarnations.get(part.table):
                known = await _look_up_in_table(topics, table_meta, flight, scan, is_ours=meta.writer == writer)
            else:  # dropped or created meanwhile: only finding the record proves its outcome
                await _add_record_at(topics, None if table_meta is None else table_meta.mapping.get(part.first), scan)
                known = scan.offset_of(flight) is not None
        if table_meta is not None and table_meta.incarnation == scan.offset_of(flight):
            incarnations[part.table] = table_meta.incarnation  # this record created the table
        if not known:
            unknown[flight] = OutcomeUnknown(
                f"{topics.data}: table {part.table} was cleaned beyond number {part.first}, so it is unknown whether "
                "that was written: it will not be written later"
            )
    return unknown


async def _look_up_in_table(
    topics: RegionTopics, table_meta: TableMeta, flight: InFlightRecord, scan: ScanResult, *, is_ours: bool
) -> bool:
    """Look the record up in the table it was written to; return whether its outcome is known now."""
    assert isinstance(flight.record, Write)
    first = flight.record.parts[0].first
    if first >= table_meta.next_seq_num:
        return True  # the number was never assigned, so the record is not valid
    if first >= table_meta.mapping.start:
        return await _add_record_at(topics, table_meta.mapping[first], scan)
    if is_ours and isinstance(flight.outcome, Acknowledged):
        # Already marked deleted. No other writer held the claim, so the number was assigned to this record.
        scan.add(flight.outcome.offset, flight.record)
        return True
    return False


async def _add_record_at(topics: RegionTopics, offset: int | None, scan: ScanResult) -> bool:
    """Add the valid record at an offset to `scan`; return False if the log no longer has it."""
    if offset is None:
        return False
    try:
        records, _ = await topics.read(start=offset, stop=offset + 1)
    except LogLost:
        return False  # marked deleted and truncated just now
    for record in records:
        scan.add(record.offset, read_record(record.value))
    return bool(records)
