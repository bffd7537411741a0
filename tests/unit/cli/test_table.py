"""Lists: columns below a header on a terminal, one JSON object per line elsewhere."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

import tidebook
from tests.unit.cli.conftest import Cli
from tidebook.cli import output
from tidebook.core.event import Event
from tidebook.log.port import Outgoing
from tidebook.queue import QueueSettings
from tidebook.queue.port import WorkerReport
from tidebook.testing.replicating import replicate


def filled() -> output.Table:
    table = output.Table("name", "count", "key", "at")
    table.add({"name": "a", "count": 1200}, "a", 1200, None, datetime(2030, 1, 31, tzinfo=UTC))
    table.add({"name": "long"}, "long", 7, "line\nbreak", None, extra=True)
    return table


def test_numbers_are_aligned_to_the_right_and_control_characters_are_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "_human", True)
    filled().print("no names")
    assert capsys.readouterr().out.splitlines() == [
        "NAME  COUNT  KEY            AT",
        "a     1,200  -              2030-01-31T00:00:00.000+00:00",
        'long      7  "line\\nbreak"  -',
    ]


@pytest.mark.parametrize(("human", "printed"), [(True, "no names\n"), (False, "")])
def test_without_rows_a_line_is_printed_for_a_person(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], human: bool, printed: str
) -> None:
    monkeypatch.setattr(output, "_human", human)
    output.Table("name").print("no names")
    assert capsys.readouterr().out == printed


def test_in_a_pipe_each_row_is_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(output, "_human", False)
    filled().print("no names")
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows == [{"name": "a", "count": 1200}, {"name": "long", "extra": True}]


#: Commands that print several columns, and their headers on a terminal.
LISTS = {
    "queue status": "QUEUE DUE LATER PROCESSING DEAD PAUSED SINCE",
    "queue list mail": "STATUS PRIORITY PROCESS AT ID KEY DATA",
    "queue flags": "ID QUEUE KEY REASON DATA",
    "queue workers mail": "WORKER STATE SINCE HEARTBEAT RUNNING DONE FAILED",
    "wal regions metrics": "REGION TABLES BYTES HELD PINNED BY TABLE START END TERM",
    "wal recover metrics 7": "TABLE NEXT MARKED HIGH WATERMARK ENTRIES BATCHES REPLAYED",
    "pipeline status": "TOPIC PARTITION REPLICATED END LAG AGE STOPPED",
    "pipeline parked": "TOPIC PARTITION EPOCH OFFSET BYTES REASON",
    "outbox status": "TOPIC WAITING OLDEST RELAYED A MINUTE PARKED HELD RELAY STATE",
    "token list": "ID NAME ROLE PREFIX EXPIRES LAST USED REVOKED",
    "projection list --app {app}": "PROJECTION STATE BUILD REBUILDING APPLIED TO PROCESSES SLICES STOPPED PARKED",
}
APP = """
def app(book):
    reminders = book.process("reminders", topics=["orders"])
    reminders(lambda effects, event: None)
    return reminders
"""


async def fill(folder: Path) -> None:
    """Add a dead letter, a worker and a parked record."""
    async with tidebook.open(folder) as book:
        await book.journal("orders").append("o-1", [Event(1)])
        await book.log.append(Outgoing("orders", 0, b"o-1", b"garbage"))
        await replicate(book.log, book.store, "orders")
        queue = book.queue("mail", settings=QueueSettings(max_timeouts=0))
        await queue.put_many(["dead", "waiting"])
        await queue.fail(await queue.claim(1), reason="no such address")
        await queue.report_worker(WorkerReport(bytes(16), "worker", concurrency=1, running=0, done=0, failed=0))


@pytest.fixture
def full(cli: Cli, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Fill a book so that every list has a row; return the name of an application."""
    (tmp_path / "listed_app.py").write_text(APP)
    monkeypatch.syspath_prepend(tmp_path)
    for line in (
        ["wal", "write", "metrics", "7", "1", "1", "--create"],
        ["outbox", "publish", "messages", "text"],
        ["token", "create", "mine"],
    ):
        assert cli(*line).code == 0
    asyncio.run(fill(book))
    return "listed_app:app"


@pytest.mark.parametrize(("line", "header"), LISTS.items())
def test_a_list_has_a_header_on_a_terminal_only(
    full: str, cli: Cli, monkeypatch: pytest.MonkeyPatch, line: str, header: str
) -> None:
    arguments = line.format(app=full).split()
    for row in cli(*arguments).out.splitlines():
        json.loads(row)
    monkeypatch.setattr(output, "choose", lambda **_: monkeypatch.setattr(output, "_human", True))
    result = cli(*arguments)
    assert result.code == 0, result.err
    first, *rows = result.out.splitlines()
    assert first.split() == header.split()
    assert rows
    assert not any(row.startswith("{") for row in rows)


EMPTY = {
    "topics list": "no topics",
    "tags list": "no tags",
    "queue status": "no queues",
    "queue list mail": "no entries",
    "queue flags": "no dead letters",
    "queue workers mail": "no workers",
    "wal regions metrics": "no regions",
    "wal recover metrics 7": "no tables",
    "wal read metrics 7": "no entries",
    "pipeline parked": "no parked records",
    "outbox status": "no topics",
    "outbox parked": "no parked messages",
    "token list": "no tokens",
}


async def create_empty(folder: Path, line: str) -> None:
    """Create a book with what the command needs, but without anything that it lists."""
    async with tidebook.open(folder) as book:
        if line.startswith("queue") and line.endswith("mail"):
            await book.queue("mail").open()
        else:
            await book.wal("metrics" if line.endswith("7") else "other").open_region(7, create=True)


@pytest.mark.parametrize(("line", "text"), EMPTY.items())
def test_an_empty_list_is_a_line_on_a_terminal_and_nothing_in_a_pipe(
    cli: Cli, book: Path, monkeypatch: pytest.MonkeyPatch, line: str, text: str
) -> None:
    asyncio.run(create_empty(book, line))
    if line.startswith("outbox"):
        assert cli("outbox", "migrate").code == 0
    assert cli(*line.split())[:2] == (0, "")
    monkeypatch.setattr(output, "choose", lambda **_: monkeypatch.setattr(output, "_human", True))
    assert cli(*line.split())[:2] == (0, f"{text}\n")


def on_terminal(*arguments: str) -> str:
    """Return what a command prints on a terminal."""
    controller, terminal = pty.openpty()
    try:
        command = [sys.executable, "-m", "tidebook.cli", *arguments]
        subprocess.run(command, stdout=terminal, stderr=terminal, timeout=60, check=True)
        return os.read(controller, 65_536).decode()
    finally:
        os.close(controller)
        os.close(terminal)


def test_a_list_on_a_terminal_has_a_header(cli: Cli, book: Path) -> None:
    assert cli("queue", "put", "mail", '{"to": "a"}').code == 0
    header = ["QUEUE", "DUE", "LATER", "PROCESSING", "DEAD", "PAUSED", "SINCE"]
    assert on_terminal("queue", "status", "--book", str(book)).split() == [*header, "mail", "1", "0", "0", "0", "-"]


def test_a_command_that_ends_by_itself_does_not_say_how_to_stop_it(book: Path) -> None:
    printed = on_terminal("up", "--once", "--book", str(book))
    assert f"Tidebook is open in {book}" in printed.replace("\r\n", "")
    assert "Ctrl-C" not in printed


def test_the_status_of_an_entry_is_a_word_on_a_terminal(cli: Cli, book: Path) -> None:
    assert cli("queue", "put", "mail", "1").code == 0
    assert on_terminal("queue", "list", "mail", "--book", str(book)).split()[7] == "waiting"
    assert json.loads(cli("queue", "list", "mail").out)["status"] == "W"


def test_the_entries_of_a_write_ahead_log_have_a_header_on_a_terminal(cli: Cli, book: Path) -> None:
    assert cli("wal", "write", "metrics", "7", "1", '"a"', "--create").code == 0
    printed = on_terminal("wal", "read", "metrics", "7", "--book", str(book))
    assert printed.split() == ["OFFSET", "TABLE", "SEQ", "PAYLOAD", "1", "1", "1", "a"]


def test_the_progress_of_a_backup_names_each_file(cli: Cli, book: Path, tmp_path: Path) -> None:
    assert cli("journal", "append", "orders", "o-1", "1").code == 0
    printed = on_terminal("backup", str(tmp_path / "copy"), "--book", str(book))
    assert "backing up log.db" in printed
    assert "backing up store.db" in printed
    restored = on_terminal("restore", str(tmp_path / "copy"), "--book", str(tmp_path / "restored"))
    assert "restoring log.db" in restored
