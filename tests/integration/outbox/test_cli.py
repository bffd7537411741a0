"""`tidebook outbox`, as a person or a script uses it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def tidebook(folder: Path, *arguments: str, code: int = 0, stdin: str = "") -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tidebook.cli.app", "outbox", *arguments]
    if arguments[0] != "schema":
        command += ["--book", str(folder / "book")]
    done = subprocess.run(command, capture_output=True, text=True, input=stdin, timeout=120)
    assert done.returncode == code, done.stderr
    if arguments[0] == "schema":
        return [{"sql": done.stdout}]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_publish_relay_status_and_parked(tmp_path: Path) -> None:
    assert tidebook(tmp_path, "migrate") == [{"migrated": True}]
    told = tidebook(tmp_path, "publish", "orders", "one", "two", "--key", "k", "--header", "kind=paid")
    assert told == [{"topic": "orders", "published": 2}]
    assert tidebook(tmp_path, "publish", "orders", "-", stdin="three\nfour\n")[0]["published"] == 2
    [status] = tidebook(tmp_path, "status")
    assert (status["topic"], status["waiting"], status["locked_by"]) == ("orders", 4, None)
    assert tidebook(tmp_path, "relay", "--once", "--threads", "2") == [{"relayed": 4}]
    [status] = tidebook(tmp_path, "status")
    assert (status["waiting"], status["relayed"], status["notice"]) == (0, 4, None)
    assert tidebook(tmp_path, "parked") == []
    assert tidebook(tmp_path, "parked", "list", "orders") == []


def test_wrong_usage_and_missing_messages_have_their_exit_codes(tmp_path: Path) -> None:
    tidebook(tmp_path, "publish", "a:b", "x", code=2)
    tidebook(tmp_path, "publish", "orders", "x", "--header", "none", code=2)
    tidebook(tmp_path, "parked", "drop", "orders", code=2)
    tidebook(tmp_path, "migrate")
    tidebook(tmp_path, "parked", "drop", "orders", "7", code=4)
    tidebook(tmp_path, "parked", "retry", "orders", "--all")
    tidebook(tmp_path, "relay", "--threads", "0", code=2)


def test_the_schema_is_printed_as_sql(tmp_path: Path) -> None:
    for database in ("postgresql", "mysql", "sqlite"):
        assert "kafka_messages" in tidebook(tmp_path, "schema", database)[0]["sql"]
    tidebook(tmp_path, "schema", "oracle", code=2)
