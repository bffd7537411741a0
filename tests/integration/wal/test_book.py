"""Regions through the public API of a book."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import tidebook
from tidebook.core.errors import InvalidInput
from tidebook.wal.meta import Pinned
from tidebook.wal.record import WalEntry


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


@pytest.fixture
def pinned_book(tmp_path: Path) -> Path:
    """Open a book whose regions pass every table with entries to the flush callback."""
    (tmp_path / "tidebook.toml").write_text("[wal]\nforce_flush_bytes = 1\nclean_every_s = 0\n")
    return tmp_path / "tidebook.toml"


@pytest.mark.timeout(30)
def test_a_flush_callback_without_a_loop_may_use_the_region(pinned_book: Path) -> None:
    threads: list[int] = []
    with tidebook.open_sync(pinned_book) as book:

        def flush(pinned: Pinned) -> None:
            threads.append(threading.get_ident())
            held = [entry.payload for entry in region.read_table(pinned.table)]
            region.mark_deleted(pinned.table, pinned.first_seq + len(held))
            region.clean()

        region = book.wal("metrics").open_region(7, create=True, on_pinned=flush)
        region.write(1, [b"a", b"b"])
        region.write(2, [b"c"])
        assert region.clean().pinned_by is None
        assert list(region.read()) == []
    assert len(threads) == 2


@pytest.mark.timeout(30)
def test_replay_handlers_without_a_loop_run_in_the_callers_thread_and_may_use_the_region(tmp_path: Path) -> None:
    threads: set[int] = set()
    with tidebook.open_sync(tmp_path) as book:
        region = book.wal("metrics").open_region(7, create=True)
        region.write_many([(1, [b"a", b"b"]), (2, [b"c"])])

        def copy(entry: WalEntry) -> None:
            threads.add(threading.get_ident())
            region.write(3, [entry.payload])

        async def count(entry: WalEntry) -> None:
            threads.add(threading.get_ident())

        steps: list[tuple[int, int]] = []
        counts = region.replay({1: copy}, other=count, progress=lambda *step: steps.append(step))
        assert counts == {1: 2, 2: 1}
        assert [entry.payload for entry in region.read_table(3)] == [b"a", b"b"]
        assert steps[-1][0] == steps[-1][1]
        with pytest.raises(InvalidInput):
            region.replay(None)  # type: ignore[arg-type]
    assert threading.get_ident() in threads


@pytest.mark.timeout(30)
def test_an_async_handler_that_blocks_on_the_book_fails_at_once(tmp_path: Path) -> None:
    with tidebook.open_sync(tmp_path) as book:
        region = book.wal("metrics").open_region(7, create=True)
        region.write(1, [b"a"])

        async def blocks(entry: WalEntry) -> None:
            region.write(2, [b"x"])

        with pytest.raises(InvalidInput, match="loop"):
            region.replay({1: blocks})
