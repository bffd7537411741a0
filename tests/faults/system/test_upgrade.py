"""A later build continues with the data of the present one; the present one stops at data of the later one."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

import tidebook
from faults.upgrade import make_next_build
from tidebook import Event, UnknownVersion

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 60.0
LATER = """
import asyncio, sys
import tidebook
async def main():
    async with tidebook.open(sys.argv[1]) as book:
        journal = book.journal("orders")
        assert [event.payload async for event in journal.read("o-1")] == ["one"]
        assert (await journal.append("o-1", [tidebook.Event("two")])).last == 2
        assert [event.payload async for event in journal.read("o-1")] == ["one", "two"]
        region = await book.wal("n").open_region(1)
        assert [entry.payload async for entry in region.read()] == [b"one"]
        assert (await region.write(1, [b"two"])).first == 2
asyncio.run(main())
"""


async def test_two_builds_write_different_versions(tmp_path: Path) -> None:
    book_folder = str(tmp_path / "book")
    async with tidebook.open(book_folder, create=True) as book:
        await book.journal("orders").append("o-1", [Event("one")])
        await (await book.wal("n").open_region(1, create=True)).write(1, [b"one"])
    build = make_next_build(tmp_path / "next")
    env = {**os.environ, "PYTHONPATH": f"{build}{os.pathsep}{ROOT}"}
    later = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LATER, book_folder, env=env, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await asyncio.wait_for(later.communicate(), TIMEOUT_S)
    assert later.returncode == 0, errors.decode()
    async with tidebook.open(book_folder) as book:
        with pytest.raises(UnknownVersion):
            await book.journal("orders").append("o-1", [Event("three")])
        with pytest.raises(UnknownVersion):
            await book.wal("n").open_region(1)
