"""Options of the command line: consistent names, a help text for each, and errors that name the option."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import typer

import tidebook
from tests.unit.cli.conftest import Cli, refused
from tidebook.cli.app import app
from tidebook.core.seq_nr import LAST
from tidebook.outbox.message import unpack_headers
from tidebook.sqlite.checksums import connect


def walk(command: Any, words: str = "tidebook") -> list[tuple[str, Any]]:
    found = [(words, command)]
    for name, each in getattr(command, "commands", {}).items():
        found += walk(each, f"{words} {name}")
    return found


COMMANDS = walk(typer.main.get_command(app))


def test_the_version_is_printed(cli: Cli) -> None:
    result = cli("--version")
    assert (result.code, result.out) == (0, f"tidebook {tidebook.__version__}\n")


@pytest.mark.parametrize("words", [words for words, _ in COMMANDS])
def test_help_is_plain_and_complete(cli: Cli, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = cli(*words.split()[1:], "-h")
    assert result.code == 0
    assert result.out == cli(*words.split()[1:], "--help").out
    assert result.out.startswith(f"Usage: {words}")
    assert "<" not in result.out.replace("<=", "")  # a name, not a type
    assert "{" not in result.out
    assert not re.search(r"\w\.\.\.$", result.out.partition("\n")[2], re.M), "a summary is cut off"


@pytest.mark.parametrize(("words", "command"), COMMANDS, ids=[words for words, _ in COMMANDS])
def test_every_command_and_option_has_help(words: str, command: Any) -> None:
    assert re.match(r"[A-Z][a-z]+,? .*\.", command.help), words
    without = [each.name for each in command.params if not getattr(each, "help", None) and not each.hidden]
    assert without == []


def test_an_option_has_the_same_meaning_in_every_command() -> None:
    """Each option has the same value name in every command, and a time has its unit in the name."""
    values = defaultdict(set)
    for _, command in COMMANDS:
        for each in command.params:
            if each.param_type_name == "option":
                for name in each.opts:
                    values[name].add(each.metavar)
    several = {name: taken for name, taken in values.items() if len(taken) > 1}
    assert several == {
        "--to": {"N", "FOLDER", "FILE"},
        "--version": {"N", None},
    }  # the version of an event, and that of the program
    in_seconds = {name for name, taken in values.items() if taken == {"SECONDS"}}
    assert in_seconds == {name for name in values if name.endswith("-s")}
    assert not {"--count", "--max", "--every", "--from"} & set(values)


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("journal append orders o-1 1 --expected -1", "--expected"),
        ("journal append orders o-1 1 --at 0", "--at"),
        ("journal append orders o-1 1 --expected 0 --at 1", "--expected or --at"),
        ("journal append orders o-1 1 --expire-after-s -1", "--expire-after-s"),
        ("journal append orders o-1 1 --expire-after-s 0.0001", "--expire-after-s"),
        ("journal read orders o-1 --start 0", "--start"),
        (f"journal read orders o-1 --end {LAST + 1}", "--end"),
        ("journal tail orders o-1 --start 0", "--start"),
        ("journal delete orders o-1 --to 0", "--to"),
        ("journal snapshot orders o-1 --seq-nr 0", "--seq-nr"),
        ("tags read paid --after nonsense", "--after"),
        ("tags read paid --since yesterday", "--since"),
        ("tags read paid --since 2030-01-31T12:00:00", "--since"),
        ("tags read paid --since 2030-01-31T12:00:00Z --after x", "--after or --since"),
        ("tags read paid --consistency none", "--consistency"),
        ("wal read metrics 7 --table -1", "--table"),
        ("wal read metrics 7 --table 1 --start -1", "--start"),
        ("wal read metrics 7 --start 1", "--table"),
        ("wal read metrics -1", "--help"),
        ("wal write metrics 7 -1 1", "--help"),
        ("queue put mail 1 --priority 256", "--priority"),
        ("queue put mail 1 --process-at never", "--process-at"),
        ("queue put mail 1 --process-at 2030-01-31T12:00:00", "--process-at"),
        ("queue put mail 1 --process-at +1e300", "--process-at"),
        ("queue put mail 1 --process-at +nan", "--process-at"),
        ("queue put mail 1 --expires-at 1900-01-01T00:00:00Z", "--expires-at"),
        ("queue list mail --limit 0", "--limit"),
        ("queue listen mail --limit 0", "--limit"),
        ("queue work mail builtins:print --lease-s 0", "--lease-s"),
        ("queue work mail builtins:print --lease-s 1e300", "--lease-s"),
        ("queue work mail builtins:print --retry-s nan", "--retry-s"),
        ("queue work mail builtins:print --retry-max-s -1", "--retry-max-s"),
        ("queue work mail builtins:print --grace-s -1", "--grace-s"),
        ("queue work mail builtins:print --concurrency 0", "--concurrency"),
        ("queue work mail tests.no_such:handler", "tests.no_such:handler"),
        ("outbox publish orders x --header nonsense", "--header"),
        ("outbox relay --threads 0", "--threads"),
        ("outbox relay --metrics nonsense", "--metrics"),
        ("outbox parked retry orders", "--all"),
        ("pipeline parked --raw", "--replay"),
        ("pipeline parked --offset 1", "--topic"),
        ("pipeline export --to x --every-s 0", "--every-s"),
        ("up --every-s 0", "--every-s"),
        ("journal append orders o-1 1 --metadata=", "JSON"),
        ("journal append orders o-1 -5", "goes after --, as in: -- -5"),
        ("token create mine --prefix \udcff", "prefix"),
        ("token create mine --prefix a/b", "prefix"),
        ("token revoke \udcff --yes", "id"),
        ("outbox parked list \udcff", "topic"),
        ("outbox parked drop \udcff --all --yes", "topic"),
        ("backup copy-\udcff", "path"),
        ("completion nonsense", "bash, zsh, fish"),
    ],
)
def test_an_error_names_the_option(cli: Cli, line: str, option: str) -> None:
    if line.startswith(("token", "outbox parked", "backup")):  # these need a book
        cli("journal", "append", "orders", "o-1", "1")
    result = cli(*line.split())
    refused(result, 2, option)
    assert not re.search(r"\b(expected=|at=|seq_nr=|expire_after\b|process_at|expires_at|lease_s|first_s)", result.err)


def test_a_module_that_exits_while_it_is_loaded_is_refused(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a worker would end at once, with the module's exit code."""
    (tmp_path / "exiting.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    refused(cli("queue", "work", "mail", "exiting:handle"), 2, "exiting:handle cannot be loaded: SystemExit")


def test_a_date_out_of_range_is_shown_as_it_was_given(cli: Cli) -> None:
    refused(
        cli("queue", "put", "mail", "1", "--process-at", "9999-12-31T23:59:59-23:00"), 2, "9999-12-31T23:59:59-23:00"
    )


def test_a_header_may_be_repeated(cli: Cli, book: Path) -> None:
    """As in Kafka, where a message may have several headers of a name."""
    assert cli("outbox", "publish", "messages", "x", "--header", "a=1", "--header", "a=2").code == 0
    connection = connect(book / "outbox.db")
    [packed] = [row[0] for row in connection.execute("SELECT headers FROM kafka_messages")]
    connection.close()
    assert unpack_headers(packed) == (("a", b"1"), ("a", b"2"))


def test_metrics_are_served_at_an_address_of_ipv6(cli: Cli) -> None:
    cli("journal", "append", "orders", "o-1", "1")
    result = cli("pipeline", "replicate", "--once", "--metrics", "[::1]:0")
    assert result.code == 0 or "Cannot assign" in result.err, result  # this machine may have no IPv6
    refused(cli("pipeline", "replicate", "--once", "--metrics", f"{'x' * 100}:0"), 5, "cannot be served")
