"""Each example has a page that the index lists, and a test."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(file.parent for file in (ROOT / "examples").glob("*/README.md"))
#: Examples without a test of their own, and the test that runs them.
TESTED_BY = {
    "cluster_job": "tests/pipeline/test_cluster.py",  # which runs the last page of the tutorial
    "declarative_pipeline": "tests/pipeline/test_declarative.py",
    "notebook": "tests/pipeline/test_notebook.py",
}


def test_every_folder_is_an_example_with_a_page() -> None:
    folders = {each for each in (ROOT / "examples").iterdir() if each.is_dir() and any(each.glob("*[!_].*"))}
    assert {each for each in folders if each.name != "__pycache__"} == {*EXAMPLES}


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_an_example_is_listed_and_tested(folder: Path) -> None:
    assert f"]({folder.name}/README.md)" in (ROOT / "examples" / "README.md").read_text()
    if folder.name in TESTED_BY:
        run = (ROOT / TESTED_BY[folder.name]).read_text()
        page = (ROOT / "docs" / "tutorial" / "cluster.md").read_text()
        assert folder.name in run or f"examples/{folder.name}/" in page
    else:
        assert "def test_" in "".join(file.read_text() for file in folder.glob("test_*.py"))
