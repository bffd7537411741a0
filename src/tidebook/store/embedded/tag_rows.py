"""Pages of a tag's stream."""

from __future__ import annotations

import apsw

from tidebook.core.position import Position
from tidebook.core.replication import EventRow, TagPlace, TagRow
from tidebook.folder.database import Database

PAGE_BYTES_MAX = 8_000_000

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
    size_bytes = 0
    try:
        rows = database.reader().execute(_PAGE, (tag, until_ms, *behind, limit))
        for log_ms, topic, partition, offset, index, epoch, id, e, o, tag_seq_nr, seq_nr, time_ms, kept in rows:
            place = TagPlace(tag, log_ms, topic, partition, offset, index, epoch)
            event = EventRow(seq_nr, kept, time_ms, Position(epoch, offset), index, log_ms)
            page.append(TagRow(place, id, Position(e, o), tag_seq_nr, event))
            size_bytes += len(kept)
            if size_bytes > PAGE_BYTES_MAX:
                break
        rows.close()
    except apsw.Error as error:
        raise database.failure(error) from error
    return page
