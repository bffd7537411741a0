"""An import loads only the modules that it needs, and packages import only those that their contracts allow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DRIVERS = [
    "acsylla",
    "apsw",
    "confluent_kafka",
    "psycopg",
    "pymysql",
    "pyspark",
    "sqlalchemy",
    "sqlite3",
    "starlette",
    "typer",
]


def test_importing_tidebook_loads_no_driver() -> None:
    script = f"import sys, tidebook; print(*[name for name in {DRIVERS!r} if name in sys.modules])"
    reported = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert reported.stdout.split() == []


def test_import_contracts_hold() -> None:
    script = "from importlinter.cli import lint_imports_command as run; run()"
    reported = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert reported.returncode == 0, reported.stdout + reported.stderr


def test_opening_a_book_imports_only_the_parts_in_use() -> None:
    parts = ("tidebook.outbox", "tidebook.queue", "tidebook.tags", "tidebook.wal")
    script = f"import sys, tidebook; tidebook.open_sync; print(*[n for n in sys.modules if n.startswith({parts!r})])"
    reported = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert reported.stdout.split() == []
