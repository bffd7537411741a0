"""Parts of a topic by ranges of ids: what a job reads that looks at everything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import Any, Final

from tidebook.core.head import Head, decode_head
from tidebook.core.key import ID_BYTES_MAX
from tidebook.core.position import Position
from tidebook.core.replication import EventRow
from tidebook.folder.database import Database
from tidebook.store.port import Split

PAGE_ROWS: Final = 5_000
PAGE_BYTES_MAX: Final = 8_000_000
STEP_ROWS: Final = 50
#: Behind every id: the last character there is, more often than an id has room for.
_END: Final = "\U0010ffff" * (ID_BYTES_MAX // 4 + 1)

_IDS = """SELECT id FROM (SELECT id, row_number() OVER (ORDER BY id) AS n FROM metajournal WHERE topic = ?)
    WHERE n % ? = 0 ORDER BY id"""
_HEADS = "SELECT id, head FROM metajournal WHERE topic = ? AND id > ? AND id <= ? ORDER BY id LIMIT ?"
_EVENTS = """SELECT id, seq_nr, kept, time_ms, epoch, "offset", "index", log_ms FROM journal
    WHERE topic = ? AND (id, seq_nr) > (?, ?) AND id <= ? ORDER BY id, seq_nr LIMIT ?"""


def id_splits(database: Database, topic: str, count: int) -> list[Split]:
    """Ranges of ids with as many heads each: low < id ≤ high."""
    connection = database.reader()
    heads: Any = connection.execute("SELECT count(*) FROM metajournal WHERE topic = ?", (topic,)).get
    step = -(-heads // max(count, 1)) or 1
    rows: list[Any] = connection.execute(_IDS, (topic, step)).fetchall()
    inner = [id for (id,) in rows]
    borders = ["", *inner[: count - 1], _END]
    return [Split(low, high) for low, high in pairwise(borders)]


def heads_in(database: Database, topic: str, split: Split) -> Iterator[Sequence[tuple[str, Head]]]:
    """Pages of the heads in a range."""
    low = split.low
    while True:
        page: list[Any] = database.reader().execute(_HEADS, (topic, low, split.high, PAGE_ROWS)).fetchall()
        if not page:
            return
        yield [(id, decode_head(head)) for id, head in page]
        low = page[-1][0]


def events_in(database: Database, topic: str, split: Split) -> Iterator[Sequence[tuple[str, EventRow]]]:
    """Pages of the event rows in a range, of not too many bytes each."""
    low: tuple[str, int] = (split.low, 2**63 - 1)
    while True:
        page: list[tuple[str, EventRow]] = []
        size_bytes = 0
        rows: Any = database.reader().execute(_EVENTS, (topic, *low, split.high, PAGE_ROWS))
        # In steps, for one over many rows costs half of one a row; a step is small, for nobody knows its bytes before.
        while size_bytes <= PAGE_BYTES_MAX and (step := list(islice(rows, STEP_ROWS))):
            page += [
                (id, EventRow(seq_nr, kept, time_ms, Position(epoch, offset), index, log_ms))
                for id, seq_nr, kept, time_ms, epoch, offset, index, log_ms in step
            ]
            size_bytes += sum([len(row[2]) for row in step])
        rows.close()
        if not page:
            return
        yield page
        low = (page[-1][0], page[-1][1].seq_nr)
