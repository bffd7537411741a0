"""Pages of a tag's stream."""

from __future__ import annotations

from functools import partial
from itertools import islice, starmap
from operator import itemgetter

import apsw

from tidebook.core.replication import TagPlace, TagRow
from tidebook.folder.database import Database

PAGE_BYTES_MAX = 8_000_000
#: How many rows are fetched before their bytes are counted.
RUN = 50

_kept = itemgetter(12)

_PAGE = """SELECT log_ms, topic, partition, "offset", "index", epoch, id, life_epoch, life_offset, tag_seq_nr,
    seq_nr, time_ms, kept FROM tag_views
    WHERE tag = ? AND log_ms < ? AND (log_ms, topic, partition, "offset", "index", epoch) > (?, ?, ?, ?, ?, ?)
    ORDER BY log_ms, topic, partition, "offset", "index", epoch LIMIT ?"""


def tag_page(
    database: Database, tag: str, after: TagPlace | None, from_ms: int, until_ms: int, limit: int
) -> list[TagRow]:
    """The next rows behind a place, fewer than `limit` where they are large."""
    behind = (from_ms, "", -1, -1, -1, -1)
    if after is not None and after.time_ms >= from_ms:
        behind = (after.time_ms, after.topic, after.partition, after.offset, after.index, after.epoch)
    page: list[TagRow] = []
    made = partial(TagRow, tag)
    size_bytes = 0
    try:
        cursor = database.reader().execute(_PAGE, (tag, until_ms, *behind, limit))
        # In runs, without a loop of Python's own over their rows: that would cost more than reading them.
        while run := list(islice(cursor, RUN)):
            page += starmap(made, run)
            size_bytes += sum(map(len, map(_kept, run)))
            if size_bytes > PAGE_BYTES_MAX:
                break
        cursor.close()
    except apsw.Error as error:
        raise database.failure(error) from error
    return page
