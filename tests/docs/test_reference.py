"""The reference is complete: it has the options of commands and the tables, and every page is listed."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from tidebook.cli.app import app
from tidebook.store.cassandra.migrations import MIGRATIONS

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
#: Options that are described once for all commands.
SHARED = {"--help", "--book", "--json", "--log-json", "--app"}
#: The rows of the page of limits that have a fixed number, each with the constants or default settings that it shows.
LIMITS = {
    "name of a topic or a queue": ("core.key:TOPIC_LENGTH_MAX",),
    "id of a journal": ("core.key:ID_BYTES_MAX",),
    "events in one append": ("core.bounds:EVENTS_MAX",),
    "record of one append, with all its events": ("journal.settings:JournalSettings.limit_bytes",),
    "`limit_bytes` on Cassandra": ("store.cassandra.store:LIMIT_BYTES_MAX",),
    "nesting of a JSON payload": ("core.payload:DEPTH_MAX",),
    "tag": ("core.event:TAG_BYTES_MAX",),
    "tags of one event": ("core.event:TAGS_BYTES_MAX", "core.event:TAGS_WARN"),
    "different tags of one journal": ("core.head:JOURNAL_TAGS_MAX",),
    "name of an event type": ("core.event:TYPE_BYTES_MAX",),
    "sequence number": ("core.bounds:NUMBER_MAX",),
    "appends whose ids a journal remembers": ("core.head:RECENT_MAX",),
    "commands whose ids an entity remembers": ("domain.decider:COMMANDS_MAX",),
    "snapshot on Cassandra": ("store.cassandra.store:SNAPSHOT_BYTES_MAX",),
    "partitions of a topic in a folder": ("log.sqlite.log:PARTITIONS_MAX",),
    "epochs of a topic": ("core.bounds:EPOCH_MAX",),
    "data of an entry": ("queue.entry:DATA_BYTES_MAX",),
    "key of an entry": ("queue.entry:KEY_BYTES_MAX",),
    "entries of one put": ("queue.port:ENTRIES_MAX", "queue.port:PUT_BYTES_MAX"),
    "entries of one claim": ("queue.queue:CLAIM_MAX", "queue.sqlite.claims:CLAIM_BYTES_MAX"),
    "entries of one claim over HTTP": ("api.queues:CLAIM_MAX",),
    "priority": ("queue.port:PRIORITY_MAX",),
    "declared fields of a queue": ("queue.fields:FIELDS_MAX",),
    "jobs that a worker runs at once": ("queue.worker:CONCURRENCY_MAX",),
    "headers of a message": ("outbox.message:HEADERS_MAX",),
    "message": ("outbox.log_topic:LIMIT_BYTES",),
    "messages of one batch of the relay": (
        "outbox.settings:OutboxSettings.batch_rows", "outbox.settings:OutboxSettings.batch_bytes",
    ),
    "name of a namespace": ("wal.topics:NAMESPACE_LENGTH_MAX",),
    "id of a region or a table": ("wal.record:ID_MAX",),
    "record of one write": ("wal.settings:WalSettings.limit_bytes",),
    "name of a projection": ("domain.projection_tables:NAME_CHARS_MAX",),
    "slices of a projection": ("domain.projection:SLICES_MAX", "domain.projection:SLICES"),
    "body of a request": ("server.settings:ServerSettings.body_bytes_max",),
    "request line and headers": ("server.protocol:HEAD_BYTES_MAX",),
    "`Idempotency-Key`": ("server.idempotency:KEY_CHARS_MAX",),
    "appends of one batch": ("api.journals:BATCH_APPENDS_MAX",),
    "events of one page": ("api.journals:PAGE_EVENTS_MAX",),
    "access tokens of a book": ("server.tokens:TOKENS_MAX",),
}  # fmt: skip
VARIABLE = re.compile(r'"(TIDEBOOK(?:_[A-Z_]+)?)"')
CREATE = re.compile(r"CREATE (?:UNLOGGED )?TABLE (?:IF NOT EXISTS )?([a-z_]+)\b(?!\.|\{)")


def leaf_commands(command: Any, words: str = "") -> Iterator[tuple[str, Any]]:
    for name, each in getattr(command, "commands", {}).items():
        yield from leaf_commands(each, f"{words} {name}".strip())
    if not getattr(command, "commands", {}):
        yield words, command


@pytest.mark.parametrize(
    ("words", "command"),
    [pytest.param(words, command, id=words) for words, command in leaf_commands(typer.main.get_command(app))],
)
def test_every_command_has_a_row_with_its_options(words: str, command: Any) -> None:
    rows = "\n".join(line for line in REFERENCE.splitlines() if f"`tidebook {words}" in line)
    assert rows
    missing = [
        each.opts[0]
        for each in command.params
        if not getattr(each, "hidden", False)
        and each.opts[0].startswith("--")
        and not {*each.opts, *each.secondary_opts} & SHARED
        and not any(option in rows for option in (*each.opts, *each.secondary_opts))
    ]
    assert missing == []


def test_the_options_of_all_commands_are_described() -> None:
    assert [option for option in sorted(SHARED) if option not in REFERENCE] == []


def test_every_table_is_in_the_reference() -> None:
    sources = [*(ROOT / "src" / "tidebook").rglob("*.py"), *(ROOT / "src" / "tidebook").rglob("*.sql")]
    tables = {name for file in sources for name in CREATE.findall(file.read_text())}
    assert len(tables) > 20
    assert [each for each in sorted(tables) if not re.search(rf"\b{each}\b", REFERENCE)] == []


def test_every_column_on_cassandra_is_described() -> None:
    page = (ROOT / "docs" / "reference" / "tables.md").read_text()
    missing = {}
    for statement in (each for migration in MIGRATIONS for each in migration.statements):
        table, columns = re.match(r"CREATE TABLE IF NOT EXISTS (\w+) \((.*?),? PRIMARY KEY", statement).groups()  # type: ignore[union-attr]
        section = re.search(rf"^## [^\n]*\b{table}\b(.*?)(?=^## |\Z)", page, re.M | re.S)
        names = [column.split()[0] for column in columns.split(", ")]
        text = section[0] if section else ""
        if absent := [each for each in names if not re.search(rf"\b{each}\b", text)]:
            missing[table] = absent
    assert missing == {}


def test_a_metric_is_named_in_full_on_every_page() -> None:
    metrics = set(re.findall(r"^\| `tidebook_(\w+)`", (ROOT / "docs/reference/metrics.md").read_text(), re.M))
    assert len(metrics) > 50
    pages = [page for folder in ("howto", "reference", "explanation") for page in (ROOT / "docs" / folder).glob("*.md")]
    words = {(page.name, word) for page in pages for word in re.findall(r"`(\w+)`", page.read_text())}
    assert {(page, word) for page, word in words if {word, f"{word}_total", f"{word}_seconds"} & metrics} == set()


def test_every_page_is_listed_in_its_folder() -> None:
    missing = [
        str(page.relative_to(ROOT))
        for page in sorted((ROOT / "docs").glob("*/*.md"))
        if page.name not in {"README.md", "0000-template.md"}
        and f"({page.name})" not in (page.parent / "README.md").read_text()
    ]
    assert missing == []


def limit(name: str) -> int:
    """Return a constant, or the default of a setting, by its place below `tidebook`."""
    module, _, attribute = name.partition(":")
    found = importlib.import_module(f"tidebook.{module}")
    owner, _, setting = attribute.partition(".")
    if not setting:
        return int(getattr(found, owner))
    [field] = [each for each in msgspec.structs.fields(getattr(found, owner)) if each.name == setting]
    return int(field.default)


@pytest.mark.parametrize(("row", "names"), LIMITS.items())
def test_a_limit_is_that_of_the_source(row: str, names: tuple[str, ...]) -> None:
    text = (ROOT / "docs" / "reference" / "limits.md").read_text()
    [shown] = re.findall(rf"^\| {re.escape(row)} \| (.*) \|$", text, re.M)
    assert [name for name in names if not re.search(rf"(?<![\d,]){limit(name):,}(?![\d,]*\d)", shown)] == []


def test_every_logger_is_on_the_page_about_monitoring() -> None:
    sources = (ROOT / "src" / "tidebook").rglob("*.py")
    loggers = {name for file in sources for name in re.findall(r'getLogger\("(tidebook\.[\w.]+)"\)', file.read_text())}
    text = (ROOT / "docs" / "howto" / "monitoring.md").read_text()
    assert len(loggers) > 5
    assert [name for name in sorted(loggers) if f"`{name}`" not in text] == []


def test_every_environment_variable_is_on_the_page_of_settings() -> None:
    sources = [file for file in (ROOT / "src" / "tidebook").rglob("*.py") if "testing" not in file.parts]
    variables = {name for file in sources for name in VARIABLE.findall(file.read_text())}
    assert len(variables) > 5
    text = (ROOT / "docs" / "reference" / "settings.md").read_text()
    assert [name for name in sorted(variables) if f"`{name}`" not in text] == []
