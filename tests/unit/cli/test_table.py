"""Lists: columns below a header on a terminal, one JSON object per line elsewhere."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Cli
from tidebook.cli import output


def filled() -> output.Table:
    table = output.Table("name", "count", "key", "at")
    table.add({"name": "a", "count": 1200}, "a", 1200, None, datetime(2030, 1, 31, tzinfo=UTC))
    table.add({"name": "long"}, "long", 7, "line\nbreak", None, extra=True)
    return table


def test_numbers_are_aligned_to_the_right_and_control_characters_are_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "_human", True)
    filled().print()
    assert capsys.readouterr().out.splitlines() == [
        "NAME  COUNT  KEY            AT",
        "a     1,200  -              2030-01-31T00:00:00.000+00:00",
        'long      7  "line\\nbreak"  -',
    ]


def test_without_rows_nothing_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(output, "_human", True)
    output.Table("name").print()
    assert capsys.readouterr().out == ""


def test_in_a_pipe_each_row_is_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(output, "_human", False)
    filled().print()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows == [{"name": "a", "count": 1200}, {"name": "long", "extra": True}]


def test_a_list_on_a_terminal_has_a_header(cli: Cli, book: Path) -> None:
    assert cli("queue", "put", "mail", '{"to": "a"}').code == 0
    here, there = pty.openpty()
    command = [sys.executable, "-m", "tidebook.cli", "queue", "status", "--book", str(book)]
    try:
        subprocess.run(command, stdout=there, timeout=60, check=True)
        printed = os.read(here, 4096).decode().split()
    finally:
        os.close(here)
        os.close(there)
    header = ["QUEUE", "DUE", "LATER", "PROCESSING", "DEAD", "PAUSED", "SINCE"]
    assert printed == [*header, "mail", "1", "0", "0", "0", "-"]
