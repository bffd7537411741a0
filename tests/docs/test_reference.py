"""The reference is complete: it has the options of commands and the tables, and every page is listed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tidebook.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
#: Options that are described once for all commands.
SHARED = {"--help", "--book", "--json", "--log-json", "--app"}
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


def test_every_page_is_listed_in_its_folder() -> None:
    missing = [
        str(page.relative_to(ROOT))
        for page in sorted((ROOT / "docs").glob("*/*.md"))
        if page.name not in {"README.md", "0000-template.md"}
        and f"({page.name})" not in (page.parent / "README.md").read_text()
    ]
    assert missing == []
