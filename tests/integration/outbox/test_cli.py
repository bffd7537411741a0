"""The command line `tidebook outbox`."""

from __future__ import annotations

import json
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from tests.integration.outbox.relaying import until


def tidebook(folder: Path, *arguments: str | bytes, code: int = 0, stdin: bytes = b"") -> list[dict[str, Any]]:
    command: list[str | bytes] = [sys.executable, "-m", "tidebook.cli.app", "outbox", *arguments]
    if arguments[0] != "schema":
        command += ["--book", str(folder / "book")]
    done = subprocess.run(command, capture_output=True, input=stdin, timeout=120)
    assert done.returncode == code, done.stderr.decode()
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    if arguments[0] == "schema":
        return [{"sql": done.stdout.decode()}]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_publish_relay_status_and_parked(tmp_path: Path) -> None:
    assert tidebook(tmp_path, "migrate") == [{"migrated": True}]
    reported = tidebook(tmp_path, "publish", "orders", "one", "two", "--key", "k", "--header", "kind=paid")
    assert reported == [{"topic": "orders", "published": 2}]
    assert tidebook(tmp_path, "publish", "orders", "-", stdin=b"three\nfour\n")[0]["published"] == 2
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
    tidebook(tmp_path, "parked", "list", "--limit", "0", code=2)
    tidebook(tmp_path, "relay", "--threads", "0", code=2)
    for wrong in ("nonsense", "127.0.0.1:99999"):
        tidebook(tmp_path, "relay", "--once", "--metrics", wrong, code=2)
    assert tidebook(tmp_path, "status") == []


def test_payloads_are_sent_unchanged(tmp_path: Path) -> None:
    assert tidebook(tmp_path, "publish", "orders", "-", stdin=b"\xff\xfe\n\x0b\x1c\n")[0]["published"] == 2
    assert tidebook(tmp_path, "publish", "orders", b"\xff")[0]["published"] == 1
    database = sqlite3.connect(tmp_path / "book" / "outbox.db")
    sent = [payload for (payload,) in database.execute("SELECT payload FROM kafka_messages ORDER BY id")]
    database.close()
    assert sent == [b"\xff\xfe", b"\x0b\x1c", b"\xff"]


def test_the_schema_is_printed_as_sql(tmp_path: Path) -> None:
    for database in ("postgresql", "mysql", "sqlite"):
        assert "kafka_messages" in tidebook(tmp_path, "schema", database)[0]["sql"]
    tidebook(tmp_path, "schema", "oracle", code=2)
    tidebook(tmp_path, "schema", "sqlite", "--to", str(tmp_path / "nowhere" / "schema.sql"), code=2)


def test_a_relay_serves_its_metrics_and_the_waiting_messages(tmp_path: Path) -> None:
    tidebook(tmp_path, "publish", "orders", "one", "two")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "tidebook.cli.app", "outbox", "relay", "--metrics", f"127.0.0.1:{port}"]
    process = subprocess.Popen([*command, "--book", str(tmp_path / "book")], stdout=subprocess.PIPE)

    def reported() -> str:
        try:
            with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
                return str(answer.read().decode())
        except URLError:
            return ""

    try:
        until(
            lambda: 'tidebook_outbox_sent_total{topic="orders"} 2' in reported(), "the messages were sent and counted"
        )
        until(lambda: 'tidebook_outbox_waiting{topic="orders"}' in reported(), "waiting messages are counted")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_second_signal_ends_a_relay_whose_database_does_not_respond(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://nobody@127.0.0.1:{silent.getsockname()[1]}/nothing"
        (tmp_path / "tidebook.toml").write_text(f'[sql]\nurl = "{url}"\n[outbox]\ncreate_tables = false\n')
        command = [sys.executable, "-m", "tidebook.cli.app", "outbox", "relay"]
        process = subprocess.Popen([*command, "--book", str(tmp_path / "tidebook.toml")], stdout=subprocess.PIPE)
        try:
            silent.settimeout(60)
            connection, _ = silent.accept()

            def ended() -> bool:
                process.send_signal(signal.SIGTERM)
                return process.poll() is not None

            until(ended, "the relay ended", timeout_s=5)
            connection.close()
        finally:
            process.kill()
            process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
