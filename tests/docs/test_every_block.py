"""Each block of code of the documents is run or read by a test, which names its page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.test_documents import RUN
from tests.docs.test_fragments import PAGES, name
from tests.docs.test_howto import PAGES as HOWTO

ROOT = Path(__file__).resolve().parents[2]
#: The beginning of a block, which may be in a list.
BEGIN = re.compile(r"^ *```(\w+)$", re.MULTILINE)
#: Pages whose blocks are run one after another, as a reader would.
WHOLE = {
    *(f"docs/howto/{page}" for page in HOWTO),
    *(f"docs/tutorial/{page}.md" for page in ("first-journal", "parts", "servers", "cluster")),
}
PYTHON = {name(page) for page in RUN}
#: Other blocks, and the file of the test that uses them.
USED_BY = {
    ("README.md", "sh"): "tests/integration/wheel/test_wheel.py",
    ("docs/howto/adapter.md", "python"): "tests/docs/test_fragments.py",
    ("docs/howto/monitoring.md", "json"): "tests/docs/test_fragments.py",
    ("docs/howto/monitoring.md", "yaml"): "tests/docs/test_fragments.py",
    ("docs/howto/moving-from-deimos.md", "sh"): "tests/integration/importing/test_deimos.py",
    ("docs/howto/moving-from-kafka-journal.md", "sh"): "tests/integration/importing/test_kafka_journal.py",
    ("docs/howto/outbox.md", "ini"): "tests/docs/test_fragments.py",
    ("docs/howto/pipeline.md", "python"): "tests/pipeline/test_source.py",
    ("docs/howto/servers.md", "python"): "tests/integration/test_servers.py",
    ("docs/howto/sizing.md", "sh"): "tests/docs/test_fragments.py",
    ("docs/howto/testing.md", "python"): "tests/docs/test_documents.py",
    ("docs/howto/wal-flush.md", "python"): "tests/pipeline/test_source.py",
    ("docs/reference/queue.md", "xml"): "tests/docs/test_fragments.py",
    ("docs/reference/testing.md", "python"): "tests/docs/test_fragments.py",
}
#: Blocks that no test runs, because they would change this machine or need one of the reader's: test_fragments checks
#: their commands and options, test_deploying the files that they name.
ONLY_READ = {("docs/howto/deploying.md", "sh"), ("docs/howto/securing.md", "sh")}
#: The kinds of blocks that show output, and settings, which test_fragments reads on every page.
OTHER = {"text", "toml"}
BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
#: Blocks of text that are not the output of the block before: the beginnings of files of other programs, and of
#: fragments of Python that need more than one process.
NO_OUTPUT = {
    "docs/howto/deploying.md": ("ExecStart=/opt/tidebook/bin/tidebook run",),
    "docs/howto/frameworks.md": ("TASKS = {", "# gunicorn.conf.py"),
    "docs/howto/queue-replication.md": ("wal_level = replica", "pg_basebackup"),
    "docs/howto/securing.md": ("location / {",),
    "docs/reference/queue.md": ("@dataclass",),
}
INDENTED = re.compile(r"(?:\A|\n\n)((?: {4}.+\n)+)")
PROGRAM = re.compile(r"^ {4,}(?:await|async|with|def|import|from|for|class)\b|^ {4}\w+ = \w+\(", re.MULTILINE)
#: Indented lines of Python: a formula, and calls that need PostgreSQL and a session of the reader.
INDENTED_PROGRAMS = {
    "docs/howto/queue.md": "await mail.open()",
    "docs/reference/partitioner.md": "partition = crc32(id",
}


def test_every_block_is_used_by_a_test() -> None:
    found = {(name(page), kind) for page in PAGES for kind in BEGIN.findall(page.read_text())}
    used = {
        (page, kind) for page, kind in found if kind in OTHER or page in WHOLE or (page in PYTHON and kind == "python")
    }
    assert found - used == {*USED_BY} | ONLY_READ


def test_a_block_of_text_shows_the_output_of_the_block_before() -> None:
    found = []
    for page in PAGES:
        before = "none"
        for kind, body in BLOCK.findall(page.read_text()):
            if kind == "text" and (name(page) not in WHOLE or before not in {"sh", "python"}):
                found.append((name(page), body))
            before = kind
    listed = [
        next((start for start in NO_OUTPUT.get(page, ()) if body.startswith(start)), body) for page, body in found
    ]
    assert sorted(listed) == sorted(start for starts in NO_OUTPUT.values() for start in starts)


def test_every_program_is_in_a_fenced_block() -> None:
    pages = {name(page): BLOCK.sub("", page.read_text()) for page in PAGES}
    programs = [(page, body) for page, text in pages.items() for body in INDENTED.findall(text) if PROGRAM.search(body)]
    assert {page: body.strip()[: len(INDENTED_PROGRAMS.get(page, ""))] for page, body in programs} == INDENTED_PROGRAMS


@pytest.mark.parametrize(("block", "test"), USED_BY.items(), ids=str)
def test_the_test_of_a_block_names_its_page(block: tuple[str, str], test: str) -> None:
    assert Path(block[0]).name in (ROOT / test).read_text()
