"""Bad input on the command line: one line, the exit code of the design, never a traceback, and nothing is changed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import apsw
import pytest

from tidebook.cli.app import main
from tidebook.core.seq_nr import LAST


class Told(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.strip()]


Cli = Callable[..., Told]


@pytest.fixture
def book(tmp_path: Path) -> Path:
    return tmp_path / "book"


@pytest.fixture
def cli(book: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """The `tidebook` command on this book."""
    monkeypatch.setenv("TIDEBOOK", str(book))

    def run(*arguments: str) -> Told:
        monkeypatch.setattr(sys, "argv", ["tidebook", *arguments])
        code: int | str | None = 0
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code
        out, err = capsys.readouterr()
        assert isinstance(code, int | None)
        return Told(code or 0, out, err)

    return run


def refused(told: Told, code: int, why: str) -> None:
    assert told.code == code, told
    assert "Traceback" not in told.err
    assert len(told.lines) == 1, told.err
    assert why in told.err
    assert told.out == ""


def test_a_good_append_is_one_line_of_json(cli: Cli) -> None:
    told = cli("journal", "append", "orders", "o-1", '{"total": 3}', "--tag", "paid", "--expected", "0")
    assert told.code == 0
    assert json.loads(told.out)["last"] == 1
    read = cli("journal", "read", "orders", "o-1")
    assert json.loads(read.out)["payload"] == {"total": 3}
    assert json.loads(read.out)["tags"] == ["paid"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["orders", "", "1"], "empty"),
        (["orders", "x" * 1001, "1"], "1000 bytes"),
        (["orders", "a\x00b", "1"], "NUL"),
        (["", "o-1", "1"], "topic"),
        (["a b", "o-1", "1"], "topic"),
        (["x" * 201, "o-1", "1"], "topic"),
        ([".", "o-1", "1"], "topic"),
        (["orders", "o-1", "{"], "no JSON value"),
        (["orders", "o-1", "NaN"], "no JSON value"),
        (["orders", "o-1", "text"], "quote text twice"),
        (["orders", "o-1", "1e999"], ""),
        (["orders", "o-1", str(2**64)], ""),
        (["orders", "o-1", '"\\ud800"'], ""),
        (["orders", "o-1", "1", "--expected", "-1"], "expected"),
        (["orders", "o-1", "1", "--expected", str(LAST + 1)], "expected"),
        (["orders", "o-1", "1", "--at", "0"], "at"),
        (["orders", "o-1", "1", "--at", str(LAST + 1)], "at"),
        (["orders", "o-1", "1", "--expected", "0", "--at", "1"], "not both"),
        (["orders", "o-1", "1", "--metadata", "[1]"], "metadata"),
        (["orders", "o-1", "1", "--metadata", "{"], "no JSON value"),
        (["orders", "o-1", "1", "--tag", ""], "tag"),
        (["orders", "o-1", "1", "--tag", "x" * 201], "tag"),
        (["orders", "o-1", "1", "--expire-after-s", "-5"], "expire_after"),
        (["orders", "o-1", "1", "--expire-after-s", "nan"], "expire"),
        (["orders", "o-1", "1", "--expire-after-s", "1e300"], "expire"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_bad_append_is_refused(cli: Cli, arguments: list[str], why: str) -> None:
    refused(cli("journal", "append", *arguments), 2, why)
    assert cli("journal", "pointer", "orders", "o-1").code == 4


def test_a_record_over_the_limit_names_size_and_limit(cli: Cli) -> None:
    refused(cli("journal", "append", "orders", "o-1", json.dumps("x" * 1_000_000)), 2, "limit is 1,000,000")


@pytest.mark.parametrize(
    "arguments",
    [
        ["read", "orders", ""],
        ["read", "orders", "o-1", "--start", "0"],
        ["read", "orders", "o-1", "--end", "-1"],
        ["tail", "orders", "o-1", "--start", "0"],
        ["pointer", "orders", ""],
        ["pointer", "a/b", "o-1"],
        ["delete", "orders", "o-1", "--to", "0"],
        ["delete", "orders", "", "--to", "1"],
        ["purge", "orders", ""],
        ["ids", ""],
        ["snapshot", "orders", "o-1", "--seq-nr", "0"],
    ],
    ids=" ".join,
)
def test_other_bad_input_is_refused(cli: Cli, arguments: list[str]) -> None:
    refused(cli("journal", *arguments), 2, "")


def test_a_conflict_is_exit_code_3_with_its_facts(cli: Cli) -> None:
    cli("journal", "append", "orders", "o-1", "1")
    refused(cli("journal", "append", "orders", "o-1", "2", "--expected", "0"), 3, "expected seq_nr 0, found 1")


@pytest.mark.parametrize("command", [["read"], ["pointer"], ["snapshot"], ["snapshot", "--save", "1"]], ids=" ".join)
def test_what_is_not_there_is_exit_code_4(cli: Cli, command: list[str]) -> None:
    refused(cli("journal", command[0], "orders", "o-1", *command[1:]), 4, "there is no")


@pytest.mark.parametrize(
    "arguments",
    [
        ["journal", "append", "orders"],
        ["journal", "append", "orders", "o-1"],
        ["journal", "append", "orders", "o-1", "1", "--expected", "many"],
        ["journal", "delete", "orders", "o-1"],
        ["journal", "nonsense"],
        ["up", "--once", "--every-s", "-1"],
        ["up", "--once", "--every-s", "0"],
        ["nonsense"],
    ],
    ids=" ".join,
)
def test_bad_usage_is_exit_code_2(cli: Cli, arguments: list[str]) -> None:
    refused(cli(*arguments), 2, "--help")


# ---- folders


def test_a_folder_that_is_a_file_is_refused(cli: Cli, book: Path) -> None:
    book.write_text("a file")
    refused(cli("journal", "append", "orders", "o-1", "1"), 2, str(book))
    assert book.read_text() == "a file"


def test_a_folder_that_cannot_be_written_is_refused(cli: Cli) -> None:
    """Not even root can write there."""
    told = cli("journal", "append", "orders", "o-1", "1", "--book", "/proc/self/tidebook")
    assert told.code in (2, 5)
    assert len(told.lines) == 1
    assert "/proc/self/tidebook" in told.err


@pytest.mark.parametrize("file", ["log.db", "store.db"])
def test_a_damaged_folder_is_refused_and_never_made_again_over_the_damage(cli: Cli, book: Path, file: str) -> None:
    cli("journal", "append", "orders", "o-1", "1")
    damage = b"this is no database at all" * 500
    (book / file).write_bytes(damage)
    for leftover in book.glob(f"{file}-*"):
        leftover.unlink()
    refused(cli("journal", "append", "orders", "o-1", "2"), 5, file)
    assert (book / file).read_bytes() == damage


@pytest.mark.parametrize("file", ["log.db", "store.db"])
def test_a_folder_of_a_newer_schema_is_refused_and_left_as_it_is(cli: Cli, book: Path, file: str) -> None:
    cli("journal", "append", "orders", "o-1", "1")
    connection = apsw.Connection(str(book / file))
    connection.pragma("user_version", 9999)
    connection.close()
    refused(cli("journal", "append", "orders", "o-1", "2"), 5, "upgrade")


@pytest.mark.parametrize("where", ["", "http://localhost:1", "no-such.toml"], ids=repr)
def test_a_book_that_cannot_be_one_is_refused(cli: Cli, where: str) -> None:
    refused(cli("journal", "ids", "orders", "--book", where), 2, "")


@pytest.mark.parametrize(
    "text",
    [
        "[journal]\npage_events = 0\n",
        "[journal]\nno_such = 1\n",
        "[nonsense]\n",
        "folder = 5\n",
        "[log]\nurl = 5\n",
        '[log]\nurl = "nonsense://x"\n',
        "this is no toml",
    ],
    ids=repr,
)
def test_settings_that_make_no_sense_are_refused(cli: Cli, tmp_path: Path, text: str) -> None:
    settings = tmp_path / "tidebook.toml"
    settings.write_text(text)
    refused(cli("journal", "pointer", "orders", "o-1", "--book", str(settings)), 2, "")


def test_damage_inside_a_file_is_found_by_the_doctor(cli: Cli, book: Path) -> None:
    for n in range(20):
        cli("journal", "append", "orders", f"o-{n}", json.dumps("x" * 3000))
    assert cli("doctor").code == 0
    size = (book / "log.db").stat().st_size
    with (book / "log.db").open("r+b") as file:
        file.seek(size - 8192)
        file.write(b"\xff" * 8192)
    told = cli("doctor")
    assert told.code == 1
    wrong = [row for row in map(json.loads, told.out.splitlines()) if row["ok"] is False]
    assert [row["check"] for row in wrong] == ["file log.db"]


def test_a_topic_that_does_not_fit_ends_up_in_one_line(cli: Cli, book: Path) -> None:
    cli("journal", "append", "orders", "o-1", "1")
    for file in book.glob("log.db*"):
        file.unlink()
    told = cli("up", "--once")
    assert told.code == 5
    assert len(told.lines) == 1
    assert "journal adopt orders" in told.err


def test_a_benchmark_that_is_not_there_is_refused(cli: Cli) -> None:
    refused(cli("bench", "nonsense"), 2, "one of")


def test_a_reader_that_leaves_is_no_failure(cli: Cli, book: Path) -> None:
    cli("journal", "append", "orders", "o-1", *map(str, range(50)))
    code = "from tidebook.cli.app import main; main()"
    reading = subprocess.Popen(
        [sys.executable, "-c", code, "journal", "read", "orders", "o-1", "--book", str(book)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert reading.stdout is not None
    reading.stdout.close()
    _, err = reading.communicate(timeout=100)
    assert (reading.returncode, err) == (0, b"")


def test_facts_that_are_damaged_are_told_in_one_line(cli: Cli, book: Path) -> None:
    cli("journal", "append", "orders", "o-1", "1")
    connection = apsw.Connection(str(book / "store.db"))
    connection.execute("UPDATE facts SET facts = 'nonsense'")
    connection.close()
    refused(cli("journal", "read", "orders", "o-1"), 5, "facts of a topic are damaged")
