"""Commands that never create a book: a missing book or object is exit code 4; topics, and the checks of `doctor`."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
import typer

from tests.unit.cli.conftest import Cli, refused
from tidebook.cli.app import app

#: Every command that never creates a book, even if it writes to one or deletes from it, with well-formed arguments.
NOT_CREATING = [
    "journal read orders o-1",
    "journal tail orders o-1",
    "journal pointer orders o-1",
    "journal delete orders o-1 --to 1 --yes",
    "journal purge orders o-1 --yes",
    "journal ids orders",
    "journal snapshot orders o-1",
    "journal snapshot orders o-1 --save 1",
    "journal adopt orders",
    "tags read paid",
    "tags read paid --follow",
    "tags list",
    "tags status",
    "tags rebuild paid",
    "topics list",
    "topics describe orders",
    "topics delete orders --yes",
    "wal write metrics 7 1 1",
    "wal read metrics 7",
    "wal regions metrics",
    "wal recover metrics 7",
    "wal mark metrics 7 1 1",
    "wal drop metrics 7 1 --yes",
    "wal snapshot metrics 7",
    "wal flush metrics 7",
    "wal clean metrics 7",
    "wal delete metrics 7 --yes",
    "backup copy --book {book}",
    "pipeline replicate",
    "pipeline status",
    "pipeline parked",
    "pipeline purge-expired",
    "pipeline verify",
    "pipeline rebuild orders",
    "pipeline export --to nowhere",
    "pipeline flush-wal metrics --to nowhere",
    "outbox relay",
    "outbox status",
    "outbox parked",
    "outbox parked list",
    "outbox parked retry orders --all",
    "outbox parked drop orders --all --yes",
    "queue list mail",
    "queue status",
    "queue status mail",
    "queue listen mail",
    "queue flags",
    "queue workers mail",
    "queue pause mail",
    "queue resume mail",
    "queue work mail builtins:print",
    "queue feed mail paid",
    "backup {book}",
    "audit verify",
    "doctor --book {book}",
]
#: Commands that create the book that they need, or use no book.
CREATING = {
    "up", "journal append", "wal write", "outbox publish", "outbox migrate", "queue put",
    "bench", "completion", "outbox schema", "pipeline script", "pipeline jars",
    # These read and write the database of an application, which --app names.
    "projection list", "projection status", "projection rebuild", "projection pause", "projection resume",
    "projection skip",
    # These serve or run a book, which they create, or keep the tokens of a server.
    "serve", "run", "token create", "token list", "token revoke",
    # These copy into a book, which they create.
    "import kafka-journal", "import deimos", "restore",
}  # fmt: skip


def commands(group: object, words: str = "") -> list[str]:
    found: dict[str, object] = getattr(group, "commands", {})
    if not found:
        return [words]
    return [each for name, command in found.items() for each in commands(command, f"{words} {name}".strip())]


def test_every_command_is_listed_as_creating_a_book_or_not() -> None:
    known = [*NOT_CREATING, *CREATING]
    every = commands(typer.main.get_command(app))
    assert [each for each in every if not any(f"{one} ".startswith(f"{each} ") for one in known)] == []


@pytest.mark.parametrize("line", NOT_CREATING)
@pytest.mark.parametrize("kind", ["no folder", "another folder"])
def test_a_missing_book_is_not_found_and_not_created(cli: Cli, book: Path, line: str, kind: str) -> None:
    if kind == "another folder":
        book.mkdir()
    result = cli(*line.format(book=book).split())
    assert (result.code, len(result.lines)) == (4, 1), result
    assert "there is no" in result.err
    assert not book.exists() or not list(book.iterdir())


UNKNOWN = [
    "journal read nothing o-1",
    "journal read orders nothing",
    "journal tail nothing o-1",
    "journal pointer nothing o-1",
    "journal pointer orders nothing",
    "journal ids nothing",
    "journal delete nothing o-1 --to 1 --yes",
    "journal purge nothing o-1 --yes",
    "journal delete orders nothing --to 1 --yes",
    "journal purge orders nothing --yes",
    "journal snapshot nothing o-1",
    "journal adopt nothing",
    "topics describe nothing",
    "topics delete nothing --yes",
    "wal read metrics 8",
    "wal read metrics 7 --table 5",
    "wal read nothing 7",
    "wal delete metrics 8 --yes",
    "wal write metrics 8 1 1",
    "pipeline status --topic nothing",
    "pipeline parked --topic nothing",
    "pipeline purge-expired --topic nothing",
    "pipeline replicate --once --topic nothing",
    "tags read paid --topic nothing",
    "tags status --topic nothing",
    "queue list nothing",
    "queue status nothing",
    "queue listen nothing",
    "queue flags nothing",
]


def test_objects_that_a_book_does_not_have_are_not_found(cli: Cli) -> None:
    cli("journal", "append", "orders", "o-1", "1")
    cli("wal", "write", "metrics", "7", "1", "1", "--create")
    cli("queue", "put", "mail", "1")
    before = cli("topics", "list", "--all").out
    for line in UNKNOWN:
        result = cli(*line.split())
        assert (line, result.code, len(result.lines)) == (line, 4, 1), result
    assert cli("topics", "list", "--all").out == before
    assert len(cli("queue", "status").out.splitlines()) == 1


def test_a_delete_reports_the_last_event_that_it_deleted(cli: Cli) -> None:
    cli("journal", "append", "orders", "o-1", "1", "2")
    assert cli("journal", "delete", "orders", "o-1", "--to", "99").out == '{"deleted_to":2}\n'


@pytest.mark.parametrize("line", ["audit verify", "backup copy", "serve"])
def test_a_command_for_a_folder_refuses_the_address_of_a_server(cli: Cli, line: str) -> None:
    """Otherwise `audit verify` would compare the `server.db` of another folder with the entries of the server."""
    result = cli(*line.split(), "--book", "http://127.0.0.1:1")
    refused(result, 2, "")
    assert "does not answer" not in result.err


def test_a_tag_that_no_event_carries_is_not_found(cli: Cli) -> None:
    cli("wal", "write", "metrics", "7", "1", "1", "--create")
    refused(cli("tags", "read", "nothing"), 4, "there is no tag 'nothing'")


def test_a_topic_is_listed_described_and_deleted(cli: Cli) -> None:
    cli("journal", "append", "orders", "o-1", "1", "2")
    cli("wal", "write", "metrics", "7", "1", "1", "--create")
    assert cli("topics", "list").out == '{"topic":"orders"}\n'
    assert "wal.metrics.7.data" in cli("topics", "list", "--all").out
    described = json.loads(cli("topics", "describe", "orders").out)
    assert (described["kind"], described["epoch"], described["lag"]) == ("journal", 1, 1)
    assert cli("topics", "delete", "orders", "--yes").code == 0
    assert cli("topics", "list").out == ""
    refused(cli("topics", "delete", "orders", "--yes"), 4, "there is no topic orders")


@pytest.mark.parametrize(("answer", "deleted"), [("y\n", True), ("n\n", False), ("\n", False), ("", False)])
def test_a_topic_is_deleted_only_after_a_yes(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, answer: str, deleted: bool
) -> None:
    cli("journal", "append", "orders", "o-1", "1")
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    result = cli("topics", "delete", "orders")
    assert result.code == (0 if deleted else 2)
    assert "Delete topic orders" in result.err
    assert (cli("topics", "list").out == "") is deleted


@pytest.mark.parametrize("section", ["journal", "tags", "wal", "outbox", "queue", "queue.mail", "pipeline", "server"])
def test_the_doctor_checks_every_section_of_the_settings(cli: Cli, tmp_path: Path, section: str) -> None:
    """A command reads only the sections of the parts that it uses."""
    file = tmp_path / "tidebook.toml"
    file.write_text(f"\n[{section}]\nno_such_option = 1\n")
    assert (
        cli("wal", "write", "metrics", "7", "1", "1", "--create", "--book", str(tmp_path / "tidebook-data")).code == 0
    )
    result = cli("doctor", "--book", str(file))
    assert result.code == 1
    wrong = [row for row in map(json.loads, result.out.splitlines()) if row["ok"] is False]
    assert [row["check"] for row in wrong] == [f"settings [{section.partition('.')[0]}]"]
    assert "line 3" in wrong[0]["detail"]


def test_the_doctor_checks_the_rules_of_masks(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "tidebook.toml"
    file.write_text('[mask]\n"orders.card" = "blur"\n')
    assert cli("queue", "put", "mail", "1", "--book", str(tmp_path / "tidebook-data")).code == 0
    result = cli("doctor", "--book", str(file))
    assert result.code == 1
    wrong = [row["check"] for row in map(json.loads, result.out.splitlines()) if row["ok"] is False]
    assert wrong == ["settings [mask]"]


@pytest.mark.parametrize("file", ["log.db", "store.db", "queue.db", "outbox.db", "server.db"])
def test_the_doctor_checks_every_file(cli: Cli, book: Path, file: str) -> None:
    cli("journal", "append", "orders", "o-1", "1")
    cli("queue", "put", "mail", "1")
    cli("outbox", "migrate")
    assert cli("token", "create", "mine").code == 0
    assert cli("doctor").code == 0
    (book / file).write_bytes(b"this is no database at all" * 500)
    for leftover in book.glob(f"{file}-*"):
        leftover.unlink()
    result = cli("doctor")
    assert result.code == 1
    wrong = {row["check"] for row in map(json.loads, result.out.splitlines()) if row["ok"] is False}
    assert f"file {file}" in wrong


def test_the_doctor_finds_a_file_of_another_user(cli: Cli, book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that root ran leaves files that the service cannot write; they are not damaged."""
    cli("journal", "append", "orders", "o-1", "1")
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != f"{book}/log.db.lock" and real(path, mode))
    result = cli("doctor")
    assert result.code == 1
    [wrong] = [row for row in map(json.loads, result.out.splitlines()) if row["ok"] is False]
    assert wrong["check"] == "file log.db"
    assert wrong["detail"] == "log.db.lock cannot be read and written by this user: chown or chmod it"


@pytest.mark.parametrize(("version", "ok"), [("11.0.2", False), ("17.0.9", None)])
def test_the_doctor_finds_a_java_that_is_too_old_for_spark(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, ok: bool | None
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").touch(0o755)
    (tmp_path / "release").write_text(f'JAVA_VERSION="{version}"\n')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    cli("journal", "append", "orders", "o-1", "1")
    result = cli("doctor")
    [java] = [row for row in map(json.loads, result.out.splitlines()) if row["check"] == "java"]
    assert java["ok"] is ok
    assert ("set JAVA_HOME to a newer one" in java["detail"]) is (ok is False)


def test_the_doctor_creates_nothing(cli: Cli, book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("queue", "put", "mail", "1")
    before = sorted(each.name for each in book.iterdir())
    assert cli("doctor").code == 0
    assert sorted(each.name for each in book.iterdir()) == before
    monkeypatch.delenv("TIDEBOOK")
    monkeypatch.chdir(book)
    assert cli("doctor").code == 0  # an installation without a book is no error
    assert sorted(each.name for each in book.iterdir()) == before


def test_a_script_purges_without_a_question(cli: Cli) -> None:
    assert cli("journal", "append", "orders", "o-1", "1").code == 0
    assert cli("journal", "purge", "orders", "o-1").code == 0
    assert cli("journal", "pointer", "orders", "o-1").code == 4
