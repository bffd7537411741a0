"""The documents are correct: their Python runs, their links resolve, and every command and error is documented."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import tidebook
from tidebook.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
#: Pages that need `book.running`.
RUNNING = ("tutorial/domain.md", "howto/projections.md", "howto/process-managers.md")
#: Pages whose examples also run a second time in the same folder.
TWICE = ("domain.md", "deciders.md", "events.md", "process-managers.md", "projections.md")
#: Pages whose Python is a complete program: it runs as printed.
RUN = [
    page
    for page in (
        ROOT / "README.md",
        ROOT / "docs/howto/tags.md",
        ROOT / "docs/howto/frameworks.md",
        ROOT / "docs/howto/outbox.md",
        ROOT / "docs/howto/events.md",
        ROOT / "docs/howto/deciders.md",
        *(ROOT / "docs" / each for each in RUNNING),
        ROOT / "docs/howto/monitoring.md",
        ROOT / "docs/howto/changing-partitions.md",
        ROOT / "docs/reference/partitioner.md",
        ROOT / "docs/explanation/embedded.md",
    )
    if page.exists()
]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", RUN, ids=name)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    # Twice in the same folder: readers repeat an example, or try that of the next page in the same folder.
    times = 2 if page.name in TWICE else 1
    for block in blocks * times:
        done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_the_tests_of_the_page_about_testing_pass(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/howto/testing.md").read_text(), re.DOTALL)
    for number, block in enumerate(blocks):
        (tmp_path / f"test_{number}.py").write_text(block)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    assert "5 passed" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_of_a_page_resolves(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    missing = [each for each in targets if each and "://" not in each and not (page.parent / each).exists()]
    assert missing == []


@pytest.mark.parametrize("page", [*ROOT.glob("docs/howto/*.md"), *ROOT.glob("docs/explanation/*.md")], ids=name)
def test_a_page_leads_on_to_other_pages(page: Path) -> None:
    assert re.search(r"\]\((?:\.\./)?[\w/-]+\.md", page.read_text())


def test_every_decision_is_in_the_index() -> None:
    index = (ROOT / "docs/decisions/README.md").read_text()
    records = [page.name for page in ROOT.glob("docs/decisions/[0-9]*.md") if not page.name.startswith("0000")]
    assert [each for each in sorted(records) if each not in index] == []


def test_every_command_is_in_the_reference() -> None:
    text = "\n".join(page.read_text() for page in ROOT.glob("docs/reference/*.md"))
    group = typer.main.get_command(app)
    missing = []
    for top, command in group.commands.items():  # type: ignore[attr-defined]
        for sub in getattr(command, "commands", {}) or [""]:
            words = f"tidebook {top} {sub}".strip()
            if words not in text:
                missing.append(words)
    assert missing == []


def test_every_error_is_in_the_reference() -> None:
    text = (ROOT / "docs/reference/errors.md").read_text()
    errors = [
        each for each in tidebook.__all__
        if isinstance(getattr(tidebook, each), type) and issubclass(getattr(tidebook, each), tidebook.TidebookError)
    ]  # fmt: skip
    assert [each for each in errors if f"`{each}`" not in text and each != "TidebookError"] == []
