"""The whole system under a short schedule of faults: the same code as `./dev faults`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).resolve().parents[3]
SEED = 7
#: Every rule that a run on an embedded book checks against something.
RULES = 14


@pytest.mark.timeout(240)
def test_everything_holds_under_faults(tmp_path: Path, long_form: bool) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "faults", "--seed", str(SEED), "--out", str(folder)]
    ran = subprocess.run(
        [*command, "--minutes", "1.5" if long_form else "0.4"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    logs = "\n".join(f"{file.name}: {file.read_text()[-800:]}" for file in sorted(folder.glob("*.log")))
    assert ran.returncode == 0, ran.stdout + ran.stderr + logs
    report = msgspec.json.decode((folder / "report.json").read_bytes())
    assert len(report["verdicts"]) == RULES
    assert [verdict["rule"] for verdict in report["verdicts"] if not verdict["checked"]] == []
    assert report["faults"]
    page = (folder / "report.html").read_text()
    assert f"--seed {SEED}" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace('"target": "http"', "")
