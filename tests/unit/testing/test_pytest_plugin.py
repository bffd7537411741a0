"""The pytest fixtures that Tidebook provides to other projects."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

from tools.commands import UNUSED_PLUGINS

ROOT = Path(__file__).resolve().parents[3]
TESTS = """
import asyncio
from datetime import timedelta
import tidebook
from tidebook import Event


async def test_what_is_appended_is_visible_after_settling(book):
    await book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
    await book.settle()
    assert [event.payload async for event in book.tags.read("paid")] == [1]


async def test_every_test_has_its_own_book(book):
    assert await book.topics() == []


async def test_the_clock_of_the_book_is_the_manual_one(book, manual_clock):
    manual_clock.set(1_000)
    await book.journal("orders").append("o-1", [Event(1)])
    manual_clock.advance(500)
    await book.journal("orders").append("o-1", [Event(2)])
    times = [event.timestamp.timestamp() async for event in book.journal("orders").read("o-1")]
    assert times == [1.0, 1.5]


async def test_a_time_out_of_a_process_is_due_when_the_manual_clock_says_so(book, manual_clock):
    reminded = []

    @book.process("reminders", topics=["orders"])
    def reminders(effects, event):
        effects.put("reminders", event.id, process_at=event.timestamp + timedelta(days=7))

    worker = book.worker("reminders", lambda job: reminded.append(job.data))
    async with book.running(reminders, worker):
        await book.journal("orders").append("o-1", [Event(1)])
        await book.settle()
        manual_clock.advance(timedelta(days=6))
        await book.settle()
        assert reminded == []
        manual_clock.advance(timedelta(days=1))
        await book.settle()
        assert reminded == ["o-1"]


def test_without_a_loop(sync_book, tidebook_folder):
    sync_book.journal("orders").append("o-1", [Event(1, tags={"paid"})])
    sync_book.settle()
    assert [event.payload for event in sync_book.tags.read("paid")] == [1]
    assert (tidebook_folder / "log.db").exists()
"""


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_shop.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *UNUSED_PLUGINS, *options, str(folder)],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_the_fixtures_work_in_another_project(tmp_path: Path) -> None:
    done = run_pytest(tmp_path)
    assert "5 passed" in done.stdout, done.stdout + done.stderr


def test_the_plugin_is_an_entry_point_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = import_module(project["entry-points"]["pytest11"]["tidebook"])
    assert found.__name__ == "tidebook.testing.pytest_plugin"


def test_importing_the_plugin_loads_neither_book_nor_driver() -> None:
    found = "[name for name in ('apsw', 'tidebook.wiring') if name in sys.modules]"
    code = f"import sys, tidebook.testing.pytest_plugin; print({found})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
