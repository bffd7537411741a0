"""A full disk refuses writes, but changes no data, and reads still work."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import tidebook
from tidebook.core.errors import InvalidInput, Unavailable
from tidebook.log.port import Outgoing, read_all
from tidebook.log.sqlite import SqliteLog
from tidebook.store.sqlite import SqliteStore


def mount(folder: Path, options: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system of a given size: the full disk was NOT tested")
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mounting is not allowed here, the full disk was NOT tested: {done.stderr.strip()}")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 2 MB."""
    folder = tmp_path / "small"
    mount(folder, "size=2m")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "read-only"
    mount(folder, "ro")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill_up(filling: Path) -> None:
    """Fill the rest of the file system."""
    with filling.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017 - the loop is what ends in it


async def fill(log: SqliteLog) -> int:
    """Append until an append is refused; return how many succeeded."""
    for n in range(10_000):
        try:
            await log.append(Outgoing("t", 0, b"k", b"%06d" % n * 100))
        except Unavailable:
            return n
    raise AssertionError("the disk never got full")


async def test_a_full_disk_fails_appends_but_not_reads(small: Path) -> None:
    log = SqliteLog(small)
    await log.create_topic("t", 1)
    taken = await fill(log)
    assert taken > 10
    for _ in range(3):
        with pytest.raises(Unavailable):
            await log.append(Outgoing("t", 0, b"k", b"x" * 200_000))
    end = await log.end("t", 0)
    records = await read_all(log, "t", 0, start=0, stop=end, key=b"k")
    assert end == taken
    assert [each.value for each in records] == [b"%06d" % n * 100 for n in range(taken)]
    assert not await log.wait("t", 0, offset=end, timeout_s=0.01)
    await log.close()
    log = SqliteLog(small)
    assert await log.end("t", 0) == end
    await log.close()


async def test_after_space_is_freed_appends_continue_where_they_stopped(small: Path) -> None:
    log = SqliteLog(small)
    await log.create_topic("t", 1)
    await log.append(Outgoing("t", 0, b"k", b"first"))
    filling = small / "filling"
    fill_up(filling)
    with pytest.raises(Unavailable, match="full"):
        await log.append(Outgoing("t", 0, b"k", b"x" * 100_000))
    answers = await asyncio.gather(
        *(log.append(Outgoing("t", 0, b"k", b"y" * 50_000)) for _ in range(20)), return_exceptions=True
    )
    assert {type(each) for each in answers} == {Unavailable}
    assert await log.end("t", 0) == 1
    filling.unlink()
    assert (await log.append(Outgoing("t", 0, b"k", b"second"))).offset == 1
    assert [each.value for each in await read_all(log, "t", 0, start=0, stop=2)] == [b"first", b"second"]
    await log.close()


async def test_opening_a_new_book_on_a_full_disk_fails_and_leaves_no_partial_files(small: Path) -> None:
    filling = small / "filling"
    fill_up(filling)
    with pytest.raises(Unavailable):
        SqliteStore(small)
    assert not (small / "store.db").exists()
    filling.unlink()
    store = SqliteStore(small)
    assert await store.setting("x") is None
    await store.close()


async def test_a_read_only_disk_is_refused(read_only: Path) -> None:
    for folder in (read_only, read_only / "below"):
        with pytest.raises(InvalidInput):
            SqliteLog(folder)


async def test_a_book_opened_on_a_full_disk_can_be_read(small: Path) -> None:
    async with tidebook.open(small / "book") as book:
        await book.journal("orders").append("o-1", [tidebook.Event("first")])
    filling = small / "filling"
    fill_up(filling)
    async with tidebook.open(small / "book") as book:
        orders = book.journal("orders")
        with pytest.raises(Unavailable, match="full"):
            await orders.append("o-1", [tidebook.Event("x" * 100_000)])
        assert [event.payload async for event in orders.read("o-1")] == ["first"]
        assert await orders.pointer("o-1") == 1


async def test_a_full_disk_is_reported_when_even_a_read_needs_space(small: Path) -> None:
    async with tidebook.open(small / "book") as book:
        await book.journal("orders").append("o-1", [tidebook.Event("first")])
    for shared in (small / "book").glob("*-shm"):
        shared.unlink()
    fill_up(small / "filling")
    with pytest.raises(Unavailable, match="disk is full"):
        async with tidebook.open(small / "book"):
            raise AssertionError
