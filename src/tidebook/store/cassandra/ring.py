"""Parts of the ring: what a job reads that looks at everything."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import Final

from tidebook.core.head import Head, decode_head
from tidebook.core.replication import EventRow
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.page_size import PageSizes
from tidebook.store.cassandra.rows import EVENTS_A_ROW_MAX, decode_rows_of, is_shared
from tidebook.store.cassandra.session import Session
from tidebook.store.port import Split

HEADS_PAGE: Final = 1000
EVENTS_PAGE: Final = 5000
#: Murmur3's tokens; no row has the least one.
_LEAST, _MOST = -(2**63), 2**63 - 1


def ring_splits(count: int) -> list[Split]:
    """The ring in equal parts: low < token ≤ high."""
    count = max(count, 1)
    borders = [_LEAST + (_MOST - _LEAST) * i // count for i in range(count)] + [_MOST]
    return [Split(str(low), str(high)) for low, high in pairwise(borders)]


async def heads_in(session: Session, topic: str, split: Split) -> AsyncIterator[Sequence[tuple[str, Head]]]:
    """Pages of the heads in a part."""
    async for page in session.pages(cql.HEADS_IN, _values(topic, split), page_size=HEADS_PAGE):
        yield [(id, decode_head(data)) for id, data in (row.as_tuple() for row in page)]


async def events_in(session: Session, topic: str, split: Split) -> AsyncIterator[Sequence[tuple[str, EventRow]]]:
    """Pages of the event rows in a part, each of not too many bytes once the size of a row is known."""
    sizes = PageSizes()
    values = _values(topic, split)
    state: bytes | None = None
    held: list[tuple[str, bytes]] = []
    while True:
        page_size = sizes.rows(topic, EVENTS_PAGE)
        page = await session.read(cql.EVENTS_IN, values, page_size=page_size, page_state=state)
        found = [row.as_tuple() for row in page]
        sizes.saw(topic, len(found), sum(len(cell) for _, cell in found))
        more = page.has_more_pages()
        found = held + found
        held = _perhaps_covered(found) if more else []
        if some := found[: len(found) - len(held)]:
            yield decode_rows_of(some)
        if not more:
            return
        state = page.page_state()


def _perhaps_covered(found: Sequence[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """The last single rows: a shared row that comes behind them may stand for them, too."""
    held: list[tuple[str, bytes]] = []
    for each in reversed(found[1 - EVENTS_A_ROW_MAX :]):
        if each[0] != found[-1][0] or is_shared(each[1]):
            break
        held.append(each)
    return held[::-1]


def _values(topic: str, split: Split) -> list[object]:
    return [int(split.low), int(split.high), topic]
