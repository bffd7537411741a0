"""Each block of code of the documents is run or read by a test, which names its page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.test_documents import RUN
from tests.docs.test_fragments import PAGES, name
from tests.docs.test_howto import PAGES as HOWTO

ROOT = Path(__file__).resolve().parents[2]
#: The begin of a block, also of one in a list.
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
#: Blocks that would change the machine or need one of the reader: test_fragments checks their commands and options,
#: test_deploying the files that they name.
ONLY_READ = {("docs/howto/deploying.md", "sh"), ("docs/howto/securing.md", "sh")}
#: The kinds of blocks that show output, and settings, which test_fragments reads on every page.
OTHER = {"text", "toml"}


def test_every_block_is_used_by_a_test() -> None:
    found = {(name(page), kind) for page in PAGES for kind in BEGIN.findall(page.read_text())}
    used = {
        (page, kind) for page, kind in found if kind in OTHER or page in WHOLE or (page in PYTHON and kind == "python")
    }
    assert found - used == {*USED_BY} | ONLY_READ


@pytest.mark.parametrize(("block", "test"), USED_BY.items(), ids=str)
def test_the_test_of_a_block_names_its_page(block: tuple[str, str], test: str) -> None:
    assert Path(block[0]).name in (ROOT / test).read_text()
