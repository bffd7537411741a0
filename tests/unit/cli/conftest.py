"""A fixture that runs the command line in this process on a new book."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tidebook.cli.app import main


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.strip()]


Cli = Callable[..., Result]


@pytest.fixture
def book(tmp_path: Path) -> Path:
    return tmp_path / "book"


@pytest.fixture
def cli(book: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Return a function that runs `tidebook` on the test's book."""
    monkeypatch.setenv("TIDEBOOK", str(book))

    def run(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["tidebook", *arguments])
        code: int | str | None = 0
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code
        out, err = capsys.readouterr()
        assert isinstance(code, int | None)
        return Result(code or 0, out, err)

    return run


def refused(result: Result, code: int, why: str) -> None:
    assert result.code == code, result
    assert "Traceback" not in result.err
    assert len(result.lines) == 1, result.err
    assert why in result.err
    assert result.out == ""
