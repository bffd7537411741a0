"""The virtual environment of ./dev: what is said while it is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import environment


@pytest.mark.parametrize(("code", "shown"), [(0, False), (1, True)])
def test_the_messages_of_venv_are_shown_only_if_it_fails(
    code: int, shown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """At Ctrl-C, which is no failure, they are a traceback."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nmkdir -p "$3"\necho Traceback >&2\nexit {code}\n')
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    monkeypatch.setattr(environment, "VENV", tmp_path / "venv")
    failed = None
    try:
        environment._make()
    except environment.SetupError as error:
        failed = str(error)
    assert ("Traceback" in capfd.readouterr().err) is shown
    assert (failed is not None) is shown
