"""Virtual environments of tools that Tidebook does not import; each is installed from its own requirement file."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from tools.environment import ROOT, SetupError, say
from tools.pip_progress import count_packages, run_pip


def ensure_tools(name: str, contents: str, *, python: Path | str = sys.executable, venv: Path | None = None) -> Path:
    """Install `requirements/NAME.txt` by hash, unless it is installed, and return the environment."""
    venv = venv or ROOT / "build" / f"{name}-venv"
    requirements = ROOT / "requirements" / f"{name}.txt"
    text = requirements.read_text()
    digest = hashlib.sha256(text.encode()).hexdigest()
    stamp = venv / "stamp"
    if stamp.exists() and stamp.read_text() == digest:
        return venv
    shutil.rmtree(venv, ignore_errors=True)
    say(f"installing requirements/{name}.txt into {venv.name}: {contents}")
    subprocess.run([str(python), "-m", "venv", str(venv)], check=True)
    options = ("--require-hashes", "--no-deps", "--only-binary", ":all:", "--no-compile", "--progress-bar", "off")
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install"]
    if run_pip([*pip, *options, "--requirement", str(requirements)], ROOT, count_packages(text)) != 0:
        raise SetupError("pip install failed; see its message above")
    stamp.write_text(digest)
    return venv
