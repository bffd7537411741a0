"""Regions through the book, as a user meets them."""

from __future__ import annotations

from pathlib import Path

import tidebook


async def test_the_book_opens_regions(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        region = await book.wal("metrics").open_region(7, create=True)
        written = await region.write(table=1, payloads=[b"a", b"b"])
        assert (written.first, written.last) == (1, 2)
    async with tidebook.open(tmp_path) as book:
        region = await book.wal("metrics").open_region(7)
        assert [(x.table, x.seq, x.payload) async for x in region.read()] == [(1, 1, b"a"), (1, 2, b"b")]
        assert region.meta.tables[1].next_seq_num == 3


def test_the_sync_book_has_the_same_names(tmp_path: Path) -> None:
    with tidebook.open_sync(tmp_path) as book:
        region = book.wal("metrics").open_region(7, create=True)
        region.write_many([(1, [b"a"]), (2, [{"n": 1}])])
        assert [x.payload for x in region.read()] == [b"a", {"n": 1}]
        region.mark_deleted(table=1, seq=2)
        region.drop_table(2)
        region.snapshot()
        assert region.clean().pinned_by is None
        assert list(region.read_table(1)) == []
        assert book.wal("metrics").regions() == [7]
