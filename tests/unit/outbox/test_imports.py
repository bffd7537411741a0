"""Importing the outbox loads no driver."""

from __future__ import annotations

import subprocess
import sys

from tests.tidy.test_imports import DRIVERS


def test_importing_the_outbox_loads_no_driver() -> None:
    names = [*DRIVERS, "django", "alembic"]
    script = f"import sys; from tidebook import outbox; print(*[name for name in {names!r} if name in sys.modules])"
    reported = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert reported.stdout.split() == []
