"""The tutorial, page by page, as it is printed; its last page is run by the tests of the Spark cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.printed_page import clone, not_printed, run_page

TUTORIAL = Path(__file__).resolve().parents[2] / "docs" / "tutorial"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return clone(tmp_path / "clone")


@pytest.fixture
def up(folder: Path) -> Iterator[None]:
    """Run `./dev up`, as in the first terminal of the tutorial."""
    command = [sys.executable, "-m", "tidebook.cli", "up", "--json", "--port", "0"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert "open" in json.loads(process.stdout.readline())
        yield
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_a_line_that_is_not_printed_or_in_another_order_is_found() -> None:
    assert not_printed("a …\nb", ["a 1", "x", "b"]) is None
    assert not_printed("a …\nb", ["b", "a 1"]) == "b"
    assert not_printed("a", ["a 1"]) == "a"


@pytest.mark.usefixtures("up")
def test_the_first_journal(folder: Path) -> None:
    run_page(TUTORIAL / "first-journal.md", folder)


def test_all_parts_in_one_folder(folder: Path) -> None:
    run_page(TUTORIAL / "parts.md", folder)


@pytest.mark.kafka
@pytest.mark.cassandra
@pytest.mark.postgres
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_kafka_cassandra_and_postgresql(
    folder: Path, kafka_bootstrap: str, cassandra_address: str, postgres_url: str
) -> None:
    (folder / ".servers").mkdir()
    (folder / ".servers" / "tidebook.toml").write_text(
        f'[log]\nurl = "kafka://{kafka_bootstrap}"\n[store]\nurl = "cassandra://{cassandra_address}/tutorial_tests"\n'
        f'[sql]\nurl = "{postgres_url}"\n[journal]\npartitions = 2\nsegments = 8\n'
    )
    run_page(TUTORIAL / "servers.md", folder)
