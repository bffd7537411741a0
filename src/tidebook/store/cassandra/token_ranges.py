"""Scan a topic by ranges of the token ring, for jobs that read all of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import Final

from tidebook.core.errors import Corrupt
from tidebook.core.head import Head, decode_head
from tidebook.core.repair import Damage
from tidebook.core.replication_plan import EventRow
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.rows import EVENTS_PER_ROW_MAX, decode_rows, decode_rows_of, is_packed
from tidebook.store.cassandra.scan import PageSizes
from tidebook.store.cassandra.session import CassandraSession
from tidebook.store.port import ScanSplit

HEADS_PAGE: Final = 1000
EVENTS_PAGE: Final = 10_000
#: Fewer than `EVENTS_PAGE`, because the sizes of these rows are not measured.
INSPECTED_PAGE: Final = 500
#: The bounds of Murmur3's tokens; no row has the lowest one.
_LEAST, _MOST = -(2**63), 2**63 - 1


def token_ranges(count: int) -> list[ScanSplit]:
    """Return the ring in equal ranges: low < token ≤ high."""
    count = max(count, 1)
    borders = [_LEAST + (_MOST - _LEAST) * i // count for i in range(count)] + [_MOST]
    return [ScanSplit(str(low), str(high)) for low, high in pairwise(borders)]


async def heads_in(
    session: CassandraSession, topic: str, split: ScanSplit
) -> AsyncIterator[Sequence[tuple[str, Head]]]:
    """Yield pages of the heads in a range."""
    async for page in session.pages(cql.HEADS_IN, _values(topic, split), page_size=HEADS_PAGE):
        yield [(id, decode_head(data)) for id, data in (row.as_tuple() for row in page)]


async def events_in(
    session: CassandraSession, topic: str, split: ScanSplit
) -> AsyncIterator[Sequence[tuple[str, EventRow]]]:
    """Yield pages of the event rows in a range, bounded in bytes once the size of a row is known."""
    sizes = PageSizes()
    values = _values(topic, split)
    state: bytes | None = None
    held_back: list[tuple[str, bytes]] = []
    while True:
        page_size = sizes.rows(topic, EVENTS_PAGE)
        page = await session.read(cql.EVENTS_IN, values, page_size=page_size, page_state=state)
        found = [row.as_tuple() for row in page]
        sizes.record(topic, len(found), sum(len(cell) for _, cell in found))
        more = page.has_more_pages()
        found = held_back + found
        held_back = _maybe_replaced(found) if more else []
        if complete := found[: len(found) - len(held_back)]:
            yield decode_rows_of(complete)
        if not more:
            return
        state = page.page_state()


async def inspect_rows(
    session: CassandraSession, topic: str, split: ScanSplit
) -> AsyncIterator[Sequence[tuple[str, Head | EventRow | Damage]]]:
    """Yield pages of a range's heads, then of its events; rows that cannot be decoded are returned as damage.

    A single row that a packed one replaces may come in an earlier page: a caller that collects a whole journal sees
    both with the same numbers, the packed one last.
    """
    async for page in session.pages(cql.HEADS_IN, _values(topic, split), page_size=HEADS_PAGE):
        yield [(id, _head_or_damage(topic, id, data)) for id, data in (row.as_tuple() for row in page)]
    async for page in session.pages(cql.INSPECTED_EVENTS_IN, _values(topic, split), page_size=INSPECTED_PAGE):
        found: list[tuple[str, Head | EventRow | Damage]] = []
        for id, seq_nr, cell in (row.as_tuple() for row in page):
            try:
                found += ((id, row) for row in decode_rows([cell]))
            except Corrupt as error:
                found.append((id, Damage("event", topic, id, str(error), seq_nr=seq_nr)))
        yield found


def _head_or_damage(topic: str, id: str, data: bytes) -> Head | Damage:
    try:
        return decode_head(data)
    except Corrupt as error:
        return Damage("head", topic, id, str(error))


def _maybe_replaced(found: Sequence[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """Return the single rows at the end of a page, which a packed row on the next page may replace."""
    held_back: list[tuple[str, bytes]] = []
    for each in reversed(found[1 - EVENTS_PER_ROW_MAX :]):
        if each[0] != found[-1][0] or is_packed(each[1]):
            break
        held_back.append(each)
    return held_back[::-1]


def _values(topic: str, split: ScanSplit) -> list[object]:
    return [int(split.low), int(split.high), topic]
