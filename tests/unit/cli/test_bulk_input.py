"""Bulk input: `-` reads JSON values from standard input, one per line."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Cli, Result, refused
from tidebook.cli import bulk_input
from tidebook.core.errors import InvalidInput

COMMAND = [sys.executable, "-m", "tidebook.cli"]


@pytest.fixture
def piped(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Return a function that runs a command with its first argument as standard input."""

    def run(text: str, *arguments: str) -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        return cli(*arguments)

    return run


def test_a_batch_ends_at_its_maximum_of_lines_or_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_input, "BATCH_LINES_MAX", 2)
    assert [*bulk_input.read_batches([b"1\n", b"\n", b"2\n", b"3"])] == [[1, 2], [3]]
    monkeypatch.setattr(bulk_input, "BATCH_BYTES_MAX", 5)
    assert [*bulk_input.read_batches([b"1000\n", b"2000\n", b"30000000\n"])] == [[1000], [2000], [30000000]]


@pytest.mark.parametrize("line", [b"{", b"\xff"], ids=["no JSON", "no text"])
def test_the_lines_before_an_invalid_one_are_yielded(line: bytes) -> None:
    batches = bulk_input.read_batches([b"1\n", b" \n", line])
    assert next(batches) == [1]
    with pytest.raises(InvalidInput, match="line 3"):
        next(batches)


def test_every_line_is_appended(piped: Cli, cli: Cli) -> None:
    result = piped('{"n": 1}\n\n"two"\n', "journal", "append", "orders", "o-1", "-", "--tag", "paid")
    assert (result.code, json.loads(result.out)["last"]) == (0, 2)
    events = [json.loads(line) for line in cli("journal", "read", "orders", "o-1").out.splitlines()]
    assert [(each["payload"], each["tags"]) for each in events] == [({"n": 1}, ["paid"]), ("two", ["paid"])]


@pytest.mark.parametrize(("condition", "first"), [(("--expected", "1"), 2), (("--at", "5"), 5)], ids=["expected", "at"])
def test_batches_are_processed_one_after_the_other(
    piped: Cli, cli: Cli, monkeypatch: pytest.MonkeyPatch, condition: tuple[str, str], first: int
) -> None:
    monkeypatch.setattr(bulk_input, "BATCH_LINES_MAX", 2)
    cli("journal", "append", "orders", "o-1", "0")
    result = piped("1\n2\n3\n4\n5\n", "journal", "append", "orders", "o-1", "-", *condition)
    assert result.code == 0
    row = json.loads(result.out)
    assert (row["first"], row["last"]) == (first, first + 4)


def test_the_lines_appended_before_a_failure_are_reported(piped: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_input, "BATCH_LINES_MAX", 2)
    result = piped("1\n2\n3\nno\n", "journal", "append", "orders", "o-1", "-")
    assert (result.code, len(result.lines)) == (2, 1)
    assert "line 4" in result.err
    row = json.loads(result.out)
    assert (row["first"], row["last"]) == (1, 3)


def test_every_line_is_put(piped: Cli) -> None:
    result = piped('"a"\n"b"\n', "queue", "put", "mail", "-")
    assert (result.code, json.loads(result.out)) == (0, {"queue": "mail", "inserted": 2, "merged": 0})


def test_every_line_is_written_to_a_region(piped: Cli, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_input, "BATCH_LINES_MAX", 2)
    result = piped("1\n2\n3\n4\nno\n", "wal", "write", "metrics", "7", "1", "-", "--create")
    assert (result.code, len(result.lines)) == (2, 1)
    assert "line 5 of standard input" in result.err
    done = json.loads(result.out)
    assert (done["first"], done["last"]) == (1, 4)
    entries = [json.loads(line) for line in cli("wal", "read", "metrics", "7").out.splitlines()]
    assert [(each["seq"], each["payload"]) for each in entries] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert entries[-1]["offset"] == done["offset"]


@pytest.mark.parametrize(
    "command",
    [
        ("journal", "append", "orders", "o-1"),
        ("queue", "put", "mail"),
        ("outbox", "publish", "messages"),
        ("wal", "write", "metrics", "7", "1", "--create"),
    ],
    ids=" ".join,
)
def test_an_empty_input_is_refused_and_creates_nothing(piped: Cli, book: Path, command: tuple[str, ...]) -> None:
    refused(piped("" if command[0] == "outbox" else "\n", *command, "-"), 2, "standard input is empty")
    assert not book.exists()


def test_an_interrupt_while_it_waits_for_a_line_is_exit_code_130(book: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "journal", "append", "orders", "o-1", "-", "--book", str(book)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdin is not None
        process.stdin.write(b"1\n" * (bulk_input.BATCH_LINES_MAX + 1))
        process.stdin.flush()
        deadline = time.monotonic() + 60
        while not (book / "log.db").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (130, b"")
        assert [json.loads(line)["last"] for line in out.splitlines()] in ([], [bulk_input.BATCH_LINES_MAX])
    finally:
        process.kill()
        process.communicate()


def test_the_complete_lines_of_a_slow_writer_are_appended_before_its_end(book: Path, cli: Cli) -> None:
    """For example of `tail -f`: lines that waited for a full batch would be lost at Ctrl-C."""
    process = subprocess.Popen(
        [*COMMAND, "journal", "append", "orders", "o-1", "-", "--book", str(book)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdin is not None
        process.stdin.write(b"1\n2\n3")  # the third line is not complete
        process.stdin.flush()
        deadline = time.monotonic() + 60
        while (result := cli("journal", "pointer", "orders", "o-1")).code == 4:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert json.loads(result.out) == {"seq_nr": 2}
        out, _ = process.communicate(b"3\n", timeout=60)
        assert json.loads(out)["last"] == 3
    finally:
        process.kill()
        process.communicate()
    last = cli("journal", "read", "orders", "o-1", "--start", "3")
    assert json.loads(last.out)["payload"] == 33


def test_lines_are_read_whole_from_a_file(tmp_path: Path) -> None:
    lines = [b"", b"1", b"x" * 200_000, b"2"]
    (tmp_path / "lines").write_bytes(b"\n".join(lines))
    with (tmp_path / "lines").open("rb") as stream:
        assert [*bulk_input.read_lines(stream)] == lines


def test_an_interrupt_waits_for_the_batch_in_flight() -> None:
    """Otherwise it could be written and not reported, and appended again by the next run."""
    interrupts, batch = [KeyboardInterrupt(), None], Future[object]()

    class Interrupted(Future[object]):
        def result(self, timeout: float | None = None) -> object:
            if (error := interrupts.pop(0)) is not None:
                raise error
            batch.set_result("written")
            return "written"

    with pytest.raises(KeyboardInterrupt):
        bulk_input._finish(Interrupted())
    assert (interrupts, batch.result()) == ([], "written")


def test_a_dash_beside_values_is_refused(cli: Cli, book: Path) -> None:
    refused(cli("journal", "append", "orders", "o-1", "-", "1"), 2, "must be the only argument")
    assert not book.exists()
