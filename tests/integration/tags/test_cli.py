"""The command `tidebook tags`, run as in a shell."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tidebook.core.event import Event
from tidebook.replication.ticks import tick
from tidebook.testing.replicating import replicate
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings


def tidebook_tags(folder: Path, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tidebook.cli.app", "tags", *arguments, "--book", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


async def fill(folder: Path) -> None:
    async with Book(Settings(folder, {"journal": Section(None, {"partitions": 1})})) as book:
        for n in range(4):
            await book.journal("orders").append("o-1", [Event({"n": n}, tags={"paid", f"mod-{n % 2}"})])
        topics = ["orders"]
        await replicate(book.log, book.store, "orders")
        await tick(book.log, book.store, topics)
        await replicate(book.log, book.store, "orders")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("book")
    asyncio.run(fill(folder))
    return folder


def test_a_stream_is_printed_and_resumed(folder: Path) -> None:
    rows = tidebook_tags(folder, "read", "paid")
    assert [(row["topic"], row["id"], row["seq_nr"], row["tag_seq_nr"], row["payload"]["n"]) for row in rows] == [
        ("orders", "o-1", n + 1, n + 1, n) for n in range(4)
    ]
    assert tidebook_tags(folder, "read", "paid", "--after", rows[1]["tag_offset"], "--topic", "orders") == rows[2:]
    assert tidebook_tags(folder, "read", "paid", "--since", "2999-01-01T00:00:00Z") == []


def test_unreplicated_records_are_reported_on_standard_error(tmp_path: Path) -> None:
    async def append() -> None:
        async with Book(Settings(tmp_path)) as book:
            await book.journal("orders").append("o-1", [Event(1, tags={"paid"})])

    asyncio.run(append())
    command = [sys.executable, "-m", "tidebook.cli.app", "tags", "read", "paid", "--book", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    for part in ("1 records are not replicated", "tidebook pipeline replicate", "tidebook up"):
        assert part in done.stderr


def test_following_while_nothing_replicates_is_reported_on_standard_error(tmp_path: Path) -> None:
    async def append() -> None:
        async with Book(Settings(tmp_path)) as book:
            await book.journal("orders").append("o-1", [Event(1, tags={"paid"})])

    asyncio.run(append())
    # A stall is reported from the first second on, so that the test need not wait for five.
    soon = "from tidebook.tags import horizon; horizon.STALL_MS = 1; from tidebook.cli.app import main; main()"
    command = [sys.executable, "-c", soon, "tags", "read", "paid", "--follow", "--book", str(tmp_path)]
    following = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert following.stderr is not None
        reported = following.stderr.readline()
    finally:
        following.kill()
        out, _ = following.communicate(timeout=60)
    assert out == ""
    parts = ("waiting for replication (", "1 records are not replicated", "orders/0 was never replicated")
    for part in (*parts, "tidebook pipeline replicate", "tidebook up"):
        assert part in reported


def test_tags_are_listed_their_completeness_is_reported_and_one_is_rebuilt(folder: Path) -> None:
    assert [row["tag"] for row in tidebook_tags(folder, "list")] == ["mod-0", "mod-1", "paid"]
    (status,) = tidebook_tags(folder, "status")
    assert status["held_by"] == {"topic": "orders", "partition": 0}
    assert status["lag_s"] >= 0
    assert status["behind_s"] == 0
    (done,) = tidebook_tags(folder, "rebuild", "paid")
    assert done == {"tag": "paid", "journals": 1, "written": 4, "removed": 0}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["read", ""], 2),
        (["read", "paid", "--after", "no offset"], 2),
        (["read", "paid", "--since", "yesterday"], 2),
        (["rebuild", "paid", "--topic", "unknown"], 4),
    ],
)
def test_errors_have_their_exit_codes(folder: Path, arguments: list[str], code: int) -> None:
    tidebook_tags(folder, *arguments, code=code)
