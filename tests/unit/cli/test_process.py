"""The command line as a process: standard streams, signals and exit codes, and no traceback."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer

import tidebook
from tests.unit.cli.conftest import Cli, refused
from tidebook.cli.app import run
from tidebook.cli.command import stop_on_signals
from tidebook.replication.ticks import tick
from tidebook.testing.replicating import replicate

COMMAND = [sys.executable, "-m", "tidebook.cli"]
#: Commands that run until they are stopped, and the stream on which each reports that it has started.
FOLLOWERS = {
    "journal tail orders o-1": "stdout",
    "up --no-replicate": "stdout",
    "queue work mail builtins:print": "stderr",
    "queue feed mail paid": "stderr",
    "queue listen due": "stdout",
    "tags read paid --follow": "stdout",
}
#: Commands that destroy data, without `--yes`.
DESTROYING = [
    "journal delete orders o-1 --to 5",
    "journal purge orders o-1",
    "topics delete orders",
    "wal drop metrics 7 1",
    "wal delete metrics 7",
    "outbox parked drop orders --all",
    "outbox parked drop orders 1",
    "queue flags mail --drop 1",
    "token revoke 1",
]


@pytest.fixture(scope="module")
def filled_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A book with a journal, a region, a queue and an outbox, which tests copy."""
    book = tmp_path_factory.mktemp("filled") / "book"
    numbers = [str(number) for number in range(20)]
    for line in (
        ["journal", "append", "orders", "o-1", *numbers],
        ["wal", "write", "metrics", "7", "1", *numbers, "--create"],
        ["queue", "put", "mail", "1", "--process-at", "+86400"],
        ["queue", "put", "due", "1"],
        ["outbox", "migrate"],
    ):
        assert run([*line, "--book", str(book)]) == 0

    async def replicated() -> None:
        async with tidebook.open(book) as opened:
            await opened.journal("orders").append("o-2", [tidebook.Event(1, tags={"paid"})])
            for _ in range(2):
                await replicate(opened.log, opened.store, "orders")
                await tick(opened.log, opened.store, ["orders"])
            await replicate(opened.log, opened.store, "orders")

    asyncio.run(replicated())
    return book


@pytest.fixture
def filled(filled_once: Path, book: Path) -> Path:
    """A copy of the filled book."""
    shutil.copytree(filled_once, book)
    return book


def ended(arguments: Sequence[str], book: Path, **streams: object) -> tuple[int, list[str]]:
    """Run a command; return its exit code and its lines on standard error."""
    where = [] if arguments[0] == "--help" else ["--book", str(book)]
    command = [*COMMAND, *arguments, *where]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False, **streams)  # type: ignore[call-overload]
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize("arguments", [["journal", "read", "orders", "o-1"], ["--help"]], ids=" ".join)
def test_a_full_standard_output_is_one_line_and_exit_code_5(filled: Path, arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        code, lines = ended(arguments, filled, stdout=full)
    assert (code, len(lines)) == (5, 1), lines
    assert "No space left on device" in lines[0]


def test_with_a_closed_standard_output_a_command_does_nothing(book: Path) -> None:
    """Otherwise a user who cannot see the result would append again."""
    code, lines = ended(["journal", "append", "orders", "o-1", "1"], book, preexec_fn=lambda: os.close(1))
    assert (code, len(lines)) == (2, 1), lines
    assert "standard output is closed" in lines[0]
    assert not book.exists()


def test_with_closed_input_and_error_streams_a_command_works(filled: Path) -> None:
    def close() -> None:
        os.close(0)
        os.close(2)

    command = [*COMMAND, "journal", "pointer", "orders", "o-1", "--book", str(filled)]
    done = subprocess.run(command, stdout=subprocess.PIPE, preexec_fn=close, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, b'{"seq_nr":20}\n')


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["wal", "read", "metrics", "7"], 0), (["outbox", "schema"], 0), (["--help"], 0), (["doctor"], 1)],
    ids=["wal read", "outbox schema", "help", "doctor"],
)
def test_a_closed_pipe_is_not_a_failure(filled: Path, arguments: list[str], expected: int) -> None:
    """The exit code of a check is its result, so it must not be 0 only because the pipe was closed."""
    if arguments == ["doctor"]:
        (filled / "store.db").write_bytes(b"this is no database" * 500)
    where = [] if arguments in (["outbox", "schema"], ["--help"]) else ["--book", str(filled)]
    reading = subprocess.Popen([*COMMAND, *arguments, *where], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert reading.stdout is not None
    reading.stdout.close()
    _, err = reading.communicate(timeout=60)
    assert (reading.returncode, err) == (expected, b"")


def test_a_question_at_the_end_of_input_changes_nothing(filled: Path, cli: Cli) -> None:
    code, lines = ended(["wal", "delete", "metrics", "7"], filled, stdin=subprocess.DEVNULL)
    assert code == 2
    assert "--yes" in lines[-1]
    assert not any("Traceback" in line for line in lines)
    assert cli("wal", "read", "metrics", "7").code == 0


def test_a_command_that_destroys_data_asks_first(filled: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = [["journal", "read", "orders", "o-1"], ["wal", "read", "metrics", "7"], ["outbox", "status"]]
    before = [cli(*read) for read in reads]
    for line in DESTROYING:
        terminal = io.StringIO("n\n")
        monkeypatch.setattr(terminal, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdin", terminal)
        result = cli(*line.split())
        assert (line, result.code, result.out) == (line, 2, "")
        assert "not confirmed" in result.err
    assert [cli(*read) for read in reads] == before


def test_an_interrupt_while_modules_load_is_exit_code_130(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nraise ImportError\n")
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "src")])}
    done = subprocess.run(
        [*COMMAND, "--help"],
        env=variables,
        capture_output=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job of a shell ignores SIGINT
    )
    assert (done.returncode, done.stderr) == (130, b"")


def test_nothing_large_is_imported_before_an_interrupt_is_handled() -> None:
    program = (
        "import sys; before = {*sys.modules}; import tidebook.cli.__main__; print(*sorted({*sys.modules} - before))"
    )
    variables = {"PYTHONPATH": os.environ.get("PYTHONPATH", "src")}
    # -S: a .pth file of an installed package may import anything.
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], env=variables, capture_output=True, text=True, check=True
    )
    loaded = done.stdout.split()
    assert "tidebook.cli.__main__" in loaded
    assert not {"typing", "asyncio", "msgspec", "typer", "tidebook.cli.app"} & {*loaded}


def test_an_interrupt_ends_every_command_with_130(filled: Path) -> None:
    """The commands run in parallel, and each is interrupted after it has started."""
    started = {
        name: subprocess.Popen(
            [*COMMAND, *name.split(), "--book", str(filled)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(
                signal.SIGINT, signal.SIG_DFL
            ),  # a background job of a shell ignores SIGINT
        )
        for name in FOLLOWERS
    }
    try:
        for name, stream in FOLLOWERS.items():
            assert getattr(started[name], stream).readline()
            started[name].send_signal(signal.SIGINT)
        for name, process in started.items():
            _, err = process.communicate(timeout=60)
            assert (name, process.returncode) == (name, 130), err
            assert b"Traceback" not in err
    finally:
        for process in started.values():
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, None)], ids=["interrupt", "terminate"]
)
def test_the_first_signal_stops_a_command_and_only_an_interrupt_has_an_exit_code(
    number: signal.Signals, code: int | None
) -> None:
    before = signal.getsignal(number)
    stopped: list[bool] = []
    found = None
    try:
        with stop_on_signals(lambda: stopped.append(True)):
            signal.raise_signal(number)
            assert stopped == [True]
    except typer.Exit as exit_:
        found = exit_.exit_code
    assert found == code
    assert signal.getsignal(number) is before


def test_an_unexpected_error_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(text: str) -> object:
        raise KeyError(text)

    monkeypatch.setattr("tidebook.cli.bulk_input.parse_payload", fail)
    refused(cli("journal", "append", "orders", "o-1", "1"), 5, "unexpected KeyError")
    monkeypatch.setenv("TIDEBOOK_TRACEBACK", "1")
    with pytest.raises(KeyError):
        cli("journal", "append", "orders", "o-1", "1")


@pytest.mark.parametrize(
    ("line", "expected"), [("queue feed mail paid --once --book {book}", 0), ("journal", 2), ("journal nonsense", 2)]
)
def test_a_full_standard_error_changes_no_result(filled: Path, line: str, expected: int) -> None:
    command = [*COMMAND, *line.format(book=filled).split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=full, timeout=60, check=False)
    assert done.returncode == expected


def test_an_error_is_short_and_shows_no_password(cli: Cli) -> None:
    long = cli("queue", "put", "mail", "1", "--process-at", "x" * 100_000)
    refused(long, 2, "--process-at")
    assert long.err.endswith("is not a time such as 2030-01-31T12:00:00Z\n")
    assert len(long.err) < 3_000
    secret = cli("journal", "read", "postgresql://me:a-password@host/shop", "o-1")
    refused(secret, 2, "postgresql://***@host/shop")


def test_json_in_a_pipe_is_utf_8_in_every_locale(filled: Path, cli: Cli) -> None:
    assert cli("journal", "append", "orders", "snow", '"☃"').code == 0
    command = [*COMMAND, "journal", "read", "orders", "snow", "--book", str(filled)]
    variables = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=variables, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout.decode())["payload"] == "☃"
