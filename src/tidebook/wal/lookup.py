"""What became of records that lie where a cleaner has cut the log: told by the mappings, as far as they can tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tidebook.core.errors import LogLost, OutcomeUnknown
from tidebook.log.port import Sent
from tidebook.wal.flight import Flight, Found
from tidebook.wal.meta import RegionMeta, TableMeta
from tidebook.wal.record import Write, read_record
from tidebook.wal.topics import RegionTopics


def lives_of(meta: RegionMeta, flights: Iterable[Flight]) -> dict[int, int]:
    """The lives of the tables that the records of these flights begin with."""
    tables = {flight.record.parts[0].table for flight in flights if isinstance(flight.record, Write)}
    return {table: meta.tables[table].life for table in tables if table in meta.tables}


async def look_up(
    topics: RegionTopics,
    meta: RegionMeta,
    flights: Iterable[Flight],
    found: Found,
    *,
    lives: Mapping[int, int],
    writer: bytes,
) -> dict[Flight, OutcomeUnknown]:
    """Add to `found` what counts of the flights that its scan may have missed; those of which nobody can tell."""
    unknown: dict[Flight, OutcomeUnknown] = {}
    lives = dict(lives)
    for flight in flights:
        if not isinstance(flight.record, Write):
            continue
        part = flight.record.parts[0]
        held = meta.tables.get(part.table)
        known = True
        if found.may_have_missed(flight):
            if held is not None and held.life == lives.get(part.table):
                known = await _in_table(topics, held, flight, found, is_ours=meta.writer == writer)
            else:  # dropped meanwhile, or made: only what is there can be told
                await _at(topics, None if held is None else held.mapping.get(part.first), found)
                known = found.offset_of(flight) is not None
        if held is not None and held.life == found.offset_of(flight):
            lives[part.table] = held.life  # it is this record that made the table
        if not known:
            unknown[flight] = OutcomeUnknown(
                f"{topics.data}: table {part.table} was cleaned up to where number {part.first} may lie, so nobody "
                "can tell whether it was written: it will not be written later"
            )
    return unknown


async def _in_table(topics: RegionTopics, held: TableMeta, flight: Flight, found: Found, *, is_ours: bool) -> bool:
    """Look in the table that the record was meant for; whether it is known now what became of it."""
    assert isinstance(flight.record, Write)
    first = flight.record.parts[0].first
    if first >= held.next_seq_num:
        return True  # the table never came so far
    if first >= held.mapping.start:
        return await _at(topics, held.mapping[first], found)
    if is_ours and isinstance(flight.outcome, Sent):
        # Flushed and marked already. Nobody else had the claim, so the number was this record's.
        found.add(flight.outcome.offset, flight.record)
        return True
    return False


async def _at(topics: RegionTopics, offset: int | None, found: Found) -> bool:
    """Show the record that counts at an offset to `found`; False where it is no longer there."""
    if offset is None:
        return False
    try:
        records, _ = await topics.read(start=offset, stop=offset + 1)
    except LogLost:
        return False  # marked and cleaned just now
    for record in records:
        found.add(record.offset, read_record(record.value))
    return bool(records)
