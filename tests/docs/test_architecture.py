"""The files and functions that ARCHITECTURE.md names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "tidebook"
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
STEPS = re.findall(r"`([\w/]+\.py):([\w.]+)`", TEXT)
FILES = sorted({*re.findall(r"`(\w+/[\w/]+\.(?:py|sql))`", TEXT)})


def names_in(body: list[ast.stmt], prefix: str = "") -> set[str]:
    """Return the classes, functions and methods of a module, by qualified name."""
    found = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                found |= names_in(node.body, f"{prefix}{node.name}.")
    return found


def test_there_are_six_walks() -> None:
    assert len(STEPS) > 50


@pytest.mark.parametrize(("file", "name"), sorted(set(STEPS)))
def test_a_step_of_a_walk_exists(file: str, name: str) -> None:
    assert name in names_in(ast.parse((SOURCE / file).read_text(encoding="utf-8")).body)


@pytest.mark.parametrize("file", FILES)
def test_a_named_file_exists(file: str) -> None:
    assert (SOURCE / file).exists()
