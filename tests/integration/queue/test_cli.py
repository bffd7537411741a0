"""The command `tidebook queue`, run as in a shell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tidebook
from tidebook.cli.app import main
from tidebook.queue.port import QueueSettings

pytestmark = pytest.mark.postgres
HANDLERS = Path(__file__).parent


def until_noted(notes: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in notes.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # another process has no event to await


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    file = tmp_path / "notes"
    file.touch()
    return file


class CommandResult(NamedTuple):
    code: int
    out: str
    err: str


class Shell:
    """Runs commands on one book, in this process or in a subprocess, with the handlers importable."""

    def __init__(
        self, where: Path, notes: Path, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]
    ) -> None:
        self._where = where
        self._patch = patch
        self._capture = capture
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HANDLERS), os.environ.get("PYTHONPATH", "")]))
        patch.setattr(sys, "path", [str(HANDLERS), *sys.path])
        patch.setenv("NOTES", str(notes))

    def result_of(self, *arguments: str) -> CommandResult:
        self._patch.setattr(sys, "argv", ["tidebook", "queue", *arguments, "--book", str(self._where)])
        code: Any = 0
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code
        return CommandResult(code or 0, *self._capture.readouterr())

    def run(self, *arguments: str) -> list[dict[str, Any]]:
        result = self.result_of(*arguments)
        assert result.code == 0, result
        return [json.loads(line) for line in result.out.splitlines()]

    def refuse(self, code: int, *arguments: str) -> None:
        result = self.result_of(*arguments)
        assert result.code == code, result
        assert len(result.err.strip().splitlines()) == 1, result.err
        assert result.out == ""

    @contextmanager
    def start(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-m", "tidebook.cli.app", "queue", *arguments, "--book", str(self._where)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def shell(where: Path, notes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(where, notes, monkeypatch, capsys)


def test_entries_are_put_listed_and_counted(shell: Shell) -> None:
    assert shell.run("put", "mail", '{"to": "x"}', '"plain"') == [{"queue": "mail", "inserted": 2, "merged": 0}]
    shell.run("put", "mail", "1", "--key", "k", "--priority", "important")
    (again,) = shell.run(
        "put", "mail", "2", "--key", "k", "--process-at", "+3600", "--expires-at", "2199-01-01T00:00:00Z"
    )
    assert again["merged"] == 1
    listed = shell.run("list", "mail")
    assert [(row["key"], row["priority"], row["data"], row["status"]) for row in listed] == [
        ("k", 10, 2, "W"),
        (None, 100, {"to": "x"}, "W"),
        (None, 100, "plain", "W"),
    ]
    assert listed[0]["expires_at"] is None  # the first put never expires, which is the latest date of all
    assert len(shell.run("list", "mail", "--limit", "1")) == 1
    (status,) = shell.run("status", "mail")
    assert (status["due"], status["later"], status["waiting"], status["processing"]) == (2, 1, 3, 0)
    shell.run("put", "other", "1")
    assert [row["queue"] for row in shell.run("status")] == ["mail", "other"]


def test_a_queue_is_paused_and_resumed(shell: Shell) -> None:
    shell.refuse(4, "pause", "mail")
    shell.run("put", "mail", "1")
    assert shell.run("pause", "mail") == [{"queue": "mail", "paused": True}]
    (status,) = shell.run("status", "mail")
    assert status["paused_at"] is not None
    assert shell.run("work", "mail", "mail_handlers:send", "--once")[-1]["done"] == 0
    assert shell.run("resume", "mail") == [{"queue": "mail", "paused": False}]
    (status,) = shell.run("status", "mail")
    assert (status["paused_at"], status["due"]) == (None, 1)


def test_dead_letters_are_shown_edited_retried_and_dropped(shell: Shell, where: Path) -> None:
    with tidebook.open_sync(where) as book:
        queue = book.queue("mail", settings=QueueSettings(max_timeouts=0))
        queue.put_many(["a", "b", "c"])
        queue.fail(queue.claim(3), reason="no such address")
    letters = {row["data"]: row["id"] for row in shell.run("flags")}
    assert set(letters) == {"a", "b", "c"}
    assert [row["reason"] for row in shell.run("flags", "mail")] == ["no such address"] * 3
    shell.run("flags", "mail", "--edit", str(letters["a"]), "--data", '"better"')
    shell.run("flags", "mail", "--retry", str(letters["a"]), "--drop", str(letters["b"]))
    assert [row["data"] for row in shell.run("flags", "mail")] == ["c"]
    assert [row["data"] for row in shell.run("list", "mail")] == ["better"]
    shell.refuse(4, "flags", "mail", "--retry", str(letters["b"]))
    shell.run("put", "other", "1")
    shell.refuse(4, "flags", "other", "--drop", str(letters["c"]))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["put", "mail", "{no json"], 2),
        (["put", "ma il", "1"], 2),
        (["put", "mail", "1", "--priority", "256"], 2),
        (["put", "mail", "1", "--priority", "urgent"], 2),
        (["put", "mail", "1", "--process-at", "tomorrow"], 2),
        (["put", "mail", "1", "--process-at", "+1e99"], 2),
        (["put", "mail", "1", "--key", ""], 2),
        (["put", "mail", "1", "--key", "k" * 1001], 2),
        (["flags", "--retry", "1"], 2),
        (["flags", "mail", "--edit", "1"], 2),
        (["flags", "mail", "--edit", "1", "--data", "1"], 4),
        (["work", "mail", "nowhere"], 2),
        (["work", "mail", "no_such_module:send"], 2),
        (["work", "mail", "mail_handlers:nothing"], 2),
        (["work", "mail", "mail_handlers:not_callable"], 2),
        (["work", "mail", "mail_handlers:send", "--lease-s", "0"], 2),
        (["work", "mail", "mail_handlers:send", "--retry-s", "-1"], 2),
        (["work", "mail_handlers:send", "--once"], 4),
        (["work", "a", "b", "mail_handlers:send"], 2),
    ],
)
@pytest.mark.parametrize("where", ["embedded"], indirect=True)
def test_an_error_is_reported_in_one_line_and_by_the_exit_code(shell: Shell, arguments: list[str], code: int) -> None:
    shell.refuse(code, *arguments)


def test_a_database_that_is_down_is_reported_in_one_line_and_by_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tidebook.toml"
    file.write_text('folder = "data"\n[sql]\nurl = "postgresql://nobody@127.0.0.1:1/nothing"\n')
    monkeypatch.setattr("tidebook.postgres.connect.OPEN_S_MAX", 0.5)
    Shell(file, tmp_path / "notes", monkeypatch, capsys).refuse(5, "status")


@pytest.mark.parametrize("name", ["send", "send_async", "Mails.send"])
def test_handlers_are_found_by_name(shell: Shell, notes: Path, name: str) -> None:
    shell.run("put", "mail", "1", "2", "3")
    (row,) = shell.run("work", "mail", f"mail_handlers:{name}", "--once", "--concurrency", "2")
    assert row == {"queue": "mail", "done": 3, "failed": 0, "lost": 0}
    assert sorted(notes.read_text().split("\n")) == ["", "sent 1", "sent 2", "sent 3"]


def test_handlers_are_found_from_the_working_directory(
    shell: Shell, notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_handlers.py").write_text("from mail_handlers import send\n")
    monkeypatch.chdir(tmp_path)
    shell.run("put", "mail", "1")
    shell.run("work", "mail", "own_handlers:send", "--once")
    assert notes.read_text() == "sent 1\n"


def test_the_only_queue_of_a_book_needs_no_name(shell: Shell, notes: Path) -> None:
    shell.run("put", "mail", "1")
    shell.run("work", "mail_handlers:send", "--once")
    assert notes.read_text() == "sent 1\n"


def test_an_entry_that_a_handler_refuses_waits_again(shell: Shell) -> None:
    shell.run("put", "mail", '"x"')
    (row,) = shell.run("work", "mail", "mail_handlers:refuse", "--once", "--retry-s", "500")
    assert row["failed"] == 1
    (entry,) = shell.run("list", "mail")
    assert (entry["timeouts"], entry["status"]) == (1, "W")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_running_job_end(shell: Shell, notes: Path, number: signal.Signals) -> None:
    shell.run("put", "mail", "1", "2")
    with shell.start("work", "mail", "mail_handlers:slow", "--concurrency", "1") as worker:
        until_noted(notes, "begun")
        worker.send_signal(number)
        out, _ = worker.communicate(timeout=30)
    assert worker.returncode == (130 if number == signal.SIGINT else 0)
    assert json.loads(out)["done"] == 1
    assert notes.read_text() == "begun\nended\n"
    assert [row["data"] for row in shell.run("list", "mail")] == [2]


def test_a_hanging_job_is_returned_and_does_not_keep_the_process(shell: Shell, notes: Path) -> None:
    shell.run("put", "mail", "1")
    with shell.start("work", "mail", "mail_handlers:hang", "--grace-s", "0.2") as worker:
        until_noted(notes, "begun")
        worker.send_signal(signal.SIGTERM)
        worker.communicate(timeout=30)
    assert worker.returncode == 0
    (entry,) = shell.run("list", "mail")
    assert (entry["status"], entry["timeouts"]) == ("W", 1)


def test_listen_reports_work(shell: Shell) -> None:
    shell.run("put", "mail", "1")
    (row,) = shell.run("listen", "mail", "--limit", "1")
    assert row["queue"] == "mail"
