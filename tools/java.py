"""Find Java 17 or newer; install it if this runs as root, otherwise ask the user to."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tools.environment import SetupError, apt_install

PACKAGE = "openjdk-17-jre-headless"
MAJOR_MIN = 17


def ensure() -> Path:
    """Return the home folder of a suitable Java; install one if none is found and this runs as root."""
    home = find()
    if home is None and os.geteuid() == 0 and shutil.which("apt-get"):
        apt_install(PACKAGE)
        home = find()
    if home is None:
        raise SetupError(
            f"Java {MAJOR_MIN} or newer is needed for Spark and the real servers. Install it (Debian: {PACKAGE}) "
            "or set JAVA_HOME to it, and try again"
        )
    return home


def find() -> Path | None:
    """Return the home folder of the first Java found that is new enough."""
    return next((home for home in _candidates() if _major(home) >= MAJOR_MIN), None)


def _candidates() -> Iterator[Path]:
    if from_environment := os.environ.get("JAVA_HOME"):
        yield Path(from_environment)
    if on_path := shutil.which("java"):
        yield Path(on_path).resolve().parent.parent
    yield from sorted(Path("/usr/lib/jvm").glob("*"), reverse=True)


def _major(home: Path) -> int:
    java = home / "bin" / "java"
    if not java.exists():
        return 0
    done = subprocess.run([str(java), "-version"], capture_output=True, text=True, check=False)
    found = re.search(r'version "(\d+)', done.stderr)
    return int(found.group(1)) if found else 0
