"""Blocks that are not complete programs (settings, commands, declarations, test classes) work as printed."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from configparser import ConfigParser
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
import yaml
from alembic.config import Config
from alembic.script import ScriptDirectory

from tests.docs.printed_page import BLOCK
from tests.docs.test_generated_reference import SETTINGS, load
from tidebook.cli.app import app
from tidebook.core.errors import InvalidInput
from tidebook.queue.fields import fields_of
from tidebook.runtime.clock import RandomIds, SystemClock
from tidebook.runtime.metrics import Metrics
from tidebook.server.masking import Masks
from tidebook.wiring.adapters import kafka_settings, server_settings
from tidebook.wiring.queue import make_queues
from tidebook.wiring.settings import SECTIONS, read_settings

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if "decisions" not in page.parts),
    *sorted(ROOT.glob("examples/*/README.md")),
]
COMMAND = re.compile(r"^(?:\$ )?(?:\S*/bin/)?tidebook ")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: str, kind: str) -> list[str]:
    found = [body for language, body in BLOCK.findall((DOCS / page).read_text()) if language == kind]
    assert found
    return found


# ---- commands


def command_lines(text: str) -> Iterator[str]:
    """Yield each command of Tidebook in the text: in blocks, indented lines, and between backticks."""
    for line in text.replace("\\\n", " ").splitlines():
        if COMMAND.match(line.strip()):
            yield line.strip()
    yield from (each for each in re.findall(r"`([^`\n]+)`", text) if COMMAND.match(each))


def unknown_words(line: str) -> list[str]:
    """Return the options of a command line that its command does not have, or its first unknown command."""
    lexer = shlex.shlex(line.replace("\\|", "|"), posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    lexer.quotes = '"' if "`" in line or line.count("'") % 2 else "\"'"
    command: Any = typer.main.get_command(app)
    options = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
    _, *words = [word.strip("[]…,") for word in lexer]
    for word in words:
        if word in {"|", "||", "&&", ";", "&", ">", "2>", ")"}:
            break
        subcommands = getattr(command, "commands", {})
        if word in subcommands:
            command = subcommands[word]
            options = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
        elif word.startswith("-") and word != "-":
            if word.partition("=")[0] not in {*options, "-h", "--help", "--install-completion", "--show-completion"}:
                return [word]
        elif subcommands and re.fullmatch("[a-z-]+", word):
            return [word]
    return []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_of_a_page_exists_with_its_options(page: Path) -> None:
    wrong = {line: unknown for line in command_lines(page.read_text()) if (unknown := unknown_words(line))}
    assert wrong == {}


def test_a_wrong_command_or_option_is_found() -> None:
    text = "    tidebook jornal read o 1\n`tidebook journal read o 1 --form 1`\ntidebook up --demo  # --nothing\n"
    assert [unknown_words(line) for line in command_lines(text)] == [["jornal"], [], ["--form"]]


# ---- settings


#: Declared fields are no settings; test_the_declarations_of_a_queue_mean_the_same reads them.
TOML = [
    (page, block)
    for page in PAGES
    for kind, block in BLOCK.findall(page.read_text())
    if kind == "toml" and "[fields]" not in block
]


@pytest.mark.parametrize(("page", "block"), TOML, ids=lambda each: name(each) if isinstance(each, Path) else "")
def test_the_settings_of_a_page_are_read(page: Path, block: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret\n")
    file = tmp_path / "tidebook.toml"
    file.write_text(re.sub(r'(\w+_file) = "[^"]+"', rf'\1 = "{secret}"', block))
    settings = read_settings(file, environment={})
    for section in SECTIONS:
        found = settings.section(section)
        if section in {"log", "store"}:
            if found.embedded:
                assert not found.options
            elif section == "log":
                kafka_settings(settings)
            else:
                module, _, class_name = SETTINGS[section].partition(":")
                server_settings(settings, section, "cassandra", module, class_name)
        elif section == "queue":
            make_queues(settings, clock=SystemClock(), ids=RandomIds(), metrics=Metrics())
        elif section == "mask":
            Masks(found.options)
        elif section in SETTINGS:
            settings.options(section, load(SETTINGS[section]))


# ---- declarations, test classes and other fragments


def test_the_declarations_of_a_queue_mean_the_same(tmp_path: Path) -> None:
    [table], [xml], [columns] = (blocks("reference/queue.md", kind) for kind in ("toml", "xml", "text"))
    (tmp_path / "mail.toml").write_text(table)
    (tmp_path / "mail.xml").write_text(xml)
    lines = columns.splitlines()
    first, second = lines[0].index("class Mail(msgspec"), lines[0].index("{")
    sources = ["\n".join(line[start:end].rstrip() for line in lines) for start, end in ((0, first), (first, second))]
    declared: list[Any] = [tmp_path / "mail.toml", tmp_path / "mail.xml", json.loads(lines[0][second:])]
    for source in sources:
        names: dict[str, Any] = {"dataclass": dataclass, "msgspec": msgspec}
        exec(compile(source, "reference/queue.md", "exec", dont_inherit=True), names)
        declared.append(names["Mail"])
    for fields in map(fields_of, declared):
        assert fields.check({"to": "ada", "retries": 2}) == {"to": "ada", "retries": 2}
        assert fields.check({"to": "ada"})["to"] == "ada"
        with pytest.raises(InvalidInput, match="not as declared"):
            fields.check({"retries": 2})


@pytest.mark.parametrize(
    ("page", "block", "prelude", "case"),
    [
        (
            "howto/adapter.md",
            0,
            "from contextlib import asynccontextmanager\n"
            "from tidebook.log.sqlite import SqliteLog\n"
            "@asynccontextmanager\n"
            "async def open_my_log(folder):\n"
            "    log = SqliteLog(folder, indexed_by_key=False)\n"
            "    yield log\n"
            "    await log.close()\n",
            "capabilities or read",
        ),
        (
            "reference/testing.md",
            1,
            "import pytest\n"
            "from tidebook.testing.conformance.journal import JournalContract\n"
            "from tidebook.wiring.book import Book\n"
            "from tidebook.wiring.settings import Section, Settings\n"
            "def open_my_book(folder, journal):\n"
            "    return Book(Settings(folder, {'journal': Section(None, journal)}))\n",
            "expected_0",
        ),
    ],
)
def test_a_contract_is_bound_as_printed(page: str, block: int, prelude: str, case: str, tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(prelude + blocks(page, "python")[block])
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", case]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


async def test_the_faults_of_the_reference_work(tmp_path: Path) -> None:
    code = compile(blocks("reference/testing.md", "python")[0], "testing.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names: dict[str, Any] = {"folder": tmp_path}
    imports = (
        "import random",
        "from tidebook.core.errors import NotFound, OutcomeUnknown, Unavailable",
        "from tidebook.log.sqlite import SqliteLog",
        "from tidebook.testing.faults import Faults",
    )
    exec("\n".join(imports), names)

    async def read() -> None:
        """Read once the block waits for it: this task runs first when the block awaits."""
        with suppress(names["NotFound"]):
            await names["log"].read("orders", 0, start=0, stop=1)

    reading = asyncio.create_task(read())
    await eval(code, names)
    await reading
    assert names["faults"].calls["read"] == 1
    await names["log"].close()


def test_the_lines_for_alembic_find_the_migrations(tmp_path: Path) -> None:
    [lines] = blocks("howto/outbox.md", "ini")
    (tmp_path / "migrations" / "versions").mkdir(parents=True)
    (tmp_path / "alembic.ini").write_text(lines)
    parser = ConfigParser(interpolation=None)
    parser.read_string(lines)
    assert parser.sections() == ["alembic"]
    config = Config(tmp_path / "alembic.ini")
    config.set_main_option("script_location", str(tmp_path / "migrations"))
    labels = {label for each in ScriptDirectory.from_config(config).walk_revisions() for label in each.branch_labels}
    assert labels == {"tidebook_outbox"}


def test_the_configuration_of_prometheus_names_files_that_exist() -> None:
    [text] = blocks("howto/monitoring.md", "yaml")
    config = yaml.safe_load(text)
    assert {(ROOT / file).exists() for file in config["rule_files"]} == {True}
    assert config["scrape_configs"][0]["static_configs"] == [{"targets": ["127.0.0.1:8470"]}]


def test_a_line_of_the_json_log_has_the_printed_fields() -> None:
    [line] = blocks("howto/monitoring.md", "json")
    program = (
        "import logging\n"
        "from tidebook.runtime.json_log import log_as_json\n"
        "log_as_json()\n"
        "try:\n"
        "    raise ValueError\n"
        "except ValueError:\n"
        "    logging.getLogger('tidebook.server').warning('x', exc_info=True, extra={'topic': 'orders'})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    written, printed = json.loads(done.stderr), json.loads(line)
    assert [*written] == [*printed]
    assert [*written["error"]] == [*printed["error"]]
    assert (written["level"], written["fields"]) == (printed["level"], printed["fields"])


def test_the_sizing_command_prints_what_the_page_shows() -> None:
    [block] = blocks("howto/sizing.md", "sh")
    command, expected = block.splitlines()
    arguments = command.removeprefix(".venv/bin/python ").split()
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == json.loads(expected.removeprefix("#"))
