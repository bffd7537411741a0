"""The command `tidebook wal`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tidebook


def tidebook_wal(folder: Path, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tidebook.cli.app", "wal", *arguments, "--book", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_region_through_the_command_line(tmp_path: Path) -> None:
    wal = ["metrics", "7"]
    (first,) = tidebook_wal(tmp_path, "write", *wal, "1", '{"n": 1}', '"two"', "--create")
    assert (first["first"], first["last"]) == (1, 2)
    tidebook_wal(tmp_path, "write", *wal, "2", "3")
    rows = tidebook_wal(tmp_path, "read", *wal)
    assert [(r["table"], r["seq"], r["payload"]) for r in rows] == [(1, 1, {"n": 1}), (1, 2, "two"), (2, 1, 3)]
    assert [r["seq"] for r in tidebook_wal(tmp_path, "read", *wal, "--table", "1", "--start", "2")] == [2]
    tidebook_wal(tmp_path, "mark", *wal, "1", "3")
    tidebook_wal(tmp_path, "drop", *wal, "2", "--yes")
    assert tidebook_wal(tmp_path, "snapshot", *wal)[0]["tables"] == 1
    (table,) = tidebook_wal(tmp_path, "recover", *wal, "--replay")
    assert (table["next_seq_num"], table["entries"], table["replayed"]) == (3, 0, 0)
    (cleaned,) = tidebook_wal(tmp_path, "clean", *wal)
    assert cleaned["removed"] > 0
    (row,) = tidebook_wal(tmp_path, "regions", "metrics")
    assert (row["region"], row["held_bytes"], row["pinned_by"]) == (7, 0, None)
    tidebook_wal(tmp_path, "delete", *wal, "--yes")
    assert tidebook_wal(tmp_path, "regions", "metrics") == []


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["read", "metrics", "9"], 4),
        (["write", "metrics", "9", "1", "{}"], 4),
        (["write", "me trics", "9", "1", "{}"], 2),
        (["write", "metrics", "9", "1", "{no json", "--create"], 2),
    ],
)
def test_errors_have_their_exit_codes(tmp_path: Path, arguments: list[str], code: int) -> None:
    tidebook_wal(tmp_path, *arguments, code=code)


async def test_commands_that_do_not_write_leave_the_owner_alone(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        region = await book.wal("metrics").open_region(7, create=True)
        await region.write(1, [b"a", b"b"])
        tidebook_wal(tmp_path, "mark", "metrics", "7", "1", "2")
        tidebook_wal(tmp_path, "clean", "metrics", "7")
        assert (await region.write(1, [b"c"])).first == 3
        assert [x.payload async for x in region.read()] == [b"b", b"c"]
