"""Completion: a script for each shell, and the candidates that it asks for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.unit.cli.conftest import Cli

COMMAND = [sys.executable, "-m", "tidebook.cli"]


@pytest.mark.parametrize(
    ("shell", "text"),
    [("bash", "complete -o default"), ("zsh", "compdef _tidebook_completion tidebook"), ("fish", "complete --command")],
)
def test_the_completion_of_each_shell_is_printed(shell: str, text: str) -> None:
    done = subprocess.run([*COMMAND, "completion", shell], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert text in done.stdout


def test_a_shell_without_completion_is_bad_usage(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("dash", "/bin/dash"))
    result = cli("--show-completion")
    assert (result.code, result.out) == (2, "")
    assert "dash" in result.err


def test_a_shell_gets_completions() -> None:
    completion = {"_TIDEBOOK_COMPLETE": "complete_bash", "COMP_WORDS": "tidebook journal app", "COMP_CWORD": "2"}
    done = subprocess.run(COMMAND, env=os.environ | completion, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["append"], "")
