"""Bad input on the command line: one line, the documented exit code, no traceback, and no change."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Cli, refused
from tidebook.core.seq_nr import LAST
from tidebook.sqlite.checksums import connect


def test_a_valid_append_prints_one_line_of_json(cli: Cli) -> None:
    result = cli("journal", "append", "orders", "o-1", '{"total": 3}', "--tag", "paid", "--expected", "0")
    assert result.code == 0
    assert json.loads(result.out)["last"] == 1
    read = cli("journal", "read", "orders", "o-1")
    assert json.loads(read.out)["payload"] == {"total": 3}
    assert json.loads(read.out)["tags"] == ["paid"]


def test_a_command_that_does_not_exist_is_answered_with_the_nearest_one(cli: Cli) -> None:
    refused(cli("jornal", "read", "orders", "o-1"), 2, "Did you mean 'journal'? see tidebook --help")


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
        (["orders", "o-1", "{"], "not a JSON value"),
        (["orders", "o-1", "NaN"], "not a JSON value"),
        (["orders", "o-1", "text"], "quote text twice"),
        (["orders", "o-1", "1e999"], ""),
        (["orders", "o-1", str(2**64)], ""),
        (["orders", "o-1", '"\\ud800"'], ""),
        (["orders", "o-1", "1", "--expected", "-1"], "--expected"),
        (["orders", "o-1", "1", "--expected", str(LAST + 1)], "--expected"),
        (["orders", "o-1", "1", "--at", "0"], "--at"),
        (["orders", "o-1", "1", "--at", str(LAST + 1)], "--at"),
        (["orders", "o-1", "1", "--expected", "0", "--at", "1"], "not both"),
        (["orders", "o-1", "1", "--metadata", "[1]"], "metadata"),
        (["orders", "o-1", "1", "--metadata", "{"], "not a JSON value"),
        (["orders", "o-1", "1", "--tag", ""], "tag"),
        (["orders", "o-1", "1", "--tag", "x" * 201], "tag"),
        (["orders", "o-1", "1", "--expire-after-s", "-5"], "--expire-after-s"),
        (["orders", "o-1", "1", "--expire-after-s", "nan"], "--expire-after-s"),
        (["orders", "o-1", "1", "--expire-after-s", "1e300"], "--expire-after-s"),
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


def test_a_conflict_is_exit_code_3_with_expected_and_found(cli: Cli) -> None:
    cli("journal", "append", "orders", "o-1", "1")
    done = cli("journal", "append", "orders", "o-1", "2", "--expected", "0")
    refused(done, 3, "expected seq_nr 0, but the last seq_nr is 1")


@pytest.mark.parametrize("command", [["read"], ["pointer"], ["snapshot"], ["snapshot", "--save", "1"]], ids=" ".join)
def test_a_missing_object_is_exit_code_4(cli: Cli, command: list[str]) -> None:
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
    """Use a folder in which not even root can write."""
    result = cli("journal", "append", "orders", "o-1", "1", "--book", "/proc/self/tidebook")
    assert result.code in (2, 5)
    assert len(result.lines) == 1
    assert "/proc/self/tidebook" in result.err


def test_a_folder_that_cannot_be_searched_is_refused_by_every_command(
    cli: Cli, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No right of the file system stops root, so the failure is simulated."""
    cli("journal", "append", "orders", "o-1", "1")
    real = os.stat

    def denied(path: object, *arguments: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(f"{book}/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", denied)
    for line in ("journal ids orders", "queue put mail 1", "outbox publish m x", "token list", "backup copy"):
        refused(cli(*line.split()), 2, "Permission denied")
    doctor = cli("doctor")
    assert (doctor.code, doctor.err) == (1, "")
    assert "Permission denied" in doctor.out.splitlines()[-1]


@pytest.mark.parametrize("file", ["log.db", "store.db"])
def test_a_damaged_folder_is_refused_and_never_overwritten(cli: Cli, book: Path, file: str) -> None:
    cli("journal", "append", "orders", "o-1", "1")
    damage = b"this is no database at all" * 500
    (book / file).write_bytes(damage)
    for leftover in book.glob(f"{file}-*"):
        leftover.unlink()
    refused(cli("journal", "append", "orders", "o-1", "2"), 5, file)
    assert (book / file).read_bytes() == damage


@pytest.mark.parametrize("file", ["log.db", "store.db"])
def test_a_folder_of_a_newer_schema_is_refused_and_not_changed(cli: Cli, book: Path, file: str) -> None:
    cli("journal", "append", "orders", "o-1", "1")
    connection = connect(book / file)
    connection.pragma("user_version", 9999)
    connection.close()
    refused(cli("journal", "append", "orders", "o-1", "2"), 5, "upgrade")


@pytest.mark.parametrize(
    "where", ["", "  ", "ftp://localhost:1", "http://", "/tmp/\udcff", f"/tmp/{'x' * 300}"], ids=ascii
)
def test_an_invalid_book_is_refused(cli: Cli, where: str) -> None:
    for line in (["ids", "orders"], ["append", "orders", "o-1", "1"]):
        refused(cli("journal", *line, "--book", where), 2, "")


def test_a_settings_file_that_is_missing_is_not_found(cli: Cli) -> None:
    refused(cli("journal", "append", "orders", "o-1", "1", "--book", "no-such.toml"), 4, "no-such.toml")


@pytest.mark.parametrize(
    "text",
    [
        "[journal]\npage_events = 0\n",
        "[journal]\nno_such = 1\n",
        "[nonsense]\n",
        "folder = 5\n",
        'folder = "\\u0000"\n',
        "[log]\nurl = 5\n",
        '[log]\nurl = "nonsense://x"\n',
        "this is no toml",
    ],
    ids=repr,
)
def test_invalid_settings_are_refused(cli: Cli, tmp_path: Path, text: str) -> None:
    settings = tmp_path / "tidebook.toml"
    settings.write_text(text)
    refused(cli("journal", "append", "orders", "o-1", "1", "--book", str(settings)), 2, "")


def test_damage_inside_a_file_is_found_by_the_doctor(cli: Cli, book: Path) -> None:
    for n in range(20):
        cli("journal", "append", "orders", f"o-{n}", json.dumps("x" * 3000))
    assert cli("doctor").code == 0
    size = (book / "log.db").stat().st_size
    with (book / "log.db").open("r+b") as file:
        file.seek(size - 8192)
        file.write(b"\xff" * 8192)
    result = cli("doctor")
    assert result.code == 1
    wrong = [row for row in map(json.loads, result.out.splitlines()) if row["ok"] is False]
    assert [row["check"] for row in wrong] == ["file log.db"]


def test_a_topic_whose_log_is_missing_is_reported_in_one_line(cli: Cli, book: Path) -> None:
    cli("journal", "append", "orders", "o-1", "1")
    for file in book.glob("log.db*"):
        file.unlink()
    result = cli("up", "--once")
    assert result.code == 5
    assert len(result.lines) == 1
    assert "journal adopt orders" in result.err


def test_an_unknown_benchmark_is_refused(cli: Cli) -> None:
    refused(cli("bench", "nonsense"), 2, "one of")


def test_a_damaged_topic_configuration_is_reported_in_one_line(cli: Cli, book: Path) -> None:
    cli("journal", "append", "orders", "o-1", "1")
    connection = connect(book / "store.db")
    connection.execute("UPDATE topic_config SET config = 'nonsense'")
    connection.close()
    refused(cli("journal", "read", "orders", "o-1"), 5, "configuration of a topic is damaged")


def test_an_outbox_without_tables_names_the_remedy(cli: Cli, tmp_path: Path) -> None:
    settings = tmp_path / "tidebook.toml"
    settings.write_text("[outbox]\ncreate_tables = false\n")
    refused(cli("outbox", "publish", "orders", "x", "--book", str(settings)), 5, "tidebook outbox migrate")
    settings.write_text("")
    for command in (["status"], ["parked"], ["parked", "drop", "orders", "--all", "--yes"]):  # reading creates no table
        refused(cli("outbox", *command, "--book", str(settings)), 5, "tidebook outbox migrate")
    assert cli("outbox", "publish", "orders", "x", "--book", str(settings)).code == 0
    assert cli("outbox", "status", "--book", str(settings)).code == 0


def test_a_master_that_spark_does_not_know_is_refused(cli: Cli, tmp_path: Path) -> None:
    settings = tmp_path / "tidebook.toml"
    settings.write_text('[pipeline]\nengine = "spark"\nmaster = "nonsense"\n')
    cli("journal", "append", "orders", "o-1", "1", "--book", str(settings))
    refused(cli("pipeline", "replicate", "--once", "--book", str(settings)), 2, "[pipeline] master")


@pytest.mark.parametrize("command", [["list"], ["retry", "orders", "--all"], ["drop", "orders", "--all", "--yes"]])
def test_an_option_before_the_command_for_parked_messages_is_refused(cli: Cli, command: list[str]) -> None:
    """The option would be ignored, and the command would act on the default book."""
    refused(cli("outbox", "parked", "--book", "nowhere", *command), 2, "--book goes after the command")
    refused(cli("outbox", "parked", "--json", *command), 2, "--json goes after the command")


def test_the_type_of_an_event_is_given_and_shown(cli: Cli) -> None:
    typed = ("--type", "deposited", "--version", "3", "--tag", "t")
    assert cli("journal", "append", "accounts", "a-1", '{"amount": 5}', *typed).code == 0
    refused(cli("journal", "append", "accounts", "a-1", "1", "--version", "3"), 2, "--version needs --type")
    assert cli("journal", "append", "accounts", "a-1", "6").code == 0
    first, second = map(json.loads, cli("journal", "read", "accounts", "a-1", "--json").out.splitlines())
    assert (first["type"], first["version"]) == ("deposited", 3)
    assert "type" not in second
    assert cli("pipeline", "replicate", "--once").code == 0
    [row] = map(json.loads, cli("tags", "read", "t", "--json").out.splitlines())
    assert (row["type"], row["version"], row["payload"]) == ("deposited", 3, {"amount": 5})
