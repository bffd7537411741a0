"""The files and functions that ARCHITECTURE.md names exist, and its walks follow the calls of the source."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "tidebook"
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
FILES = sorted({*re.findall(r"`(\w+/[\w/]+\.(?:py|sql))`", TEXT)})
NAMED = sorted({*re.findall(r"`([\w/]+\.py):([\w.]+)`", TEXT)})
#: A walk: its title, its limit, and its numbered lines.
WALK = re.compile(r"^\*\*(.+)\*\* \(limit (\d+)\)\n((?:\d+\. .*\n(?:   .*\n)*)+)", re.MULTILINE)
STEP = re.compile(r"^(\d+)\. (?:([→⇢]) )?`([\w/]+\.py):([\w.]+)`", re.MULTILINE)


class Step(NamedTuple):
    number: int
    arrow: str
    file: str
    name: str

    @property
    def body(self) -> ast.AST:
        """The definition of the step."""
        return definitions(ast.parse((SOURCE / self.file).read_text(encoding="utf-8")))[self.name]

    @property
    def called_as(self) -> str:
        """Return the name by which callers refer to a step: an object that is called has the name of its class."""
        owner, _, last = self.name.rpartition(".")
        return owner if last == "__call__" else last


WALKS = {
    title: (int(limit), [Step(int(number), *rest) for number, *rest in STEP.findall(lines)])
    for title, limit, lines in WALK.findall(TEXT)
}


def definitions(module: ast.Module | ast.ClassDef, prefix: str = "") -> dict[str, ast.AST]:
    """Return the classes, functions and methods of a module, by qualified name."""
    found: dict[str, ast.AST] = {}
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[prefix + node.name] = node
            if isinstance(node, ast.ClassDef):
                found |= definitions(node, f"{prefix}{node.name}.")
    return found


def mentioned(body: ast.AST) -> set[str]:
    """Return the names that a function calls or passes on as callbacks."""
    nodes = list(ast.walk(body))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute)} | {
        node.id for node in nodes if isinstance(node, ast.Name)
    }


def test_there_are_six_walks() -> None:
    assert len(WALKS) == 6


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_is_numbered_and_within_its_limit(title: str) -> None:
    limit, steps = WALKS[title]
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    assert 5 < len(steps) <= limit


@pytest.mark.parametrize("title", WALKS)
def test_each_step_is_called_by_an_earlier_one(title: str) -> None:
    steps = WALKS[title][1]
    known = mentioned(steps[0].body)
    for before, step in pairwise(steps):
        if step.arrow == "→":
            assert step.called_as in known, f"{before.name} and the steps before it do not call {step.name}"
        known |= mentioned(step.body)


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_named_definition_exists(file: str, name: str) -> None:
    assert name in definitions(ast.parse((SOURCE / file).read_text(encoding="utf-8")))


@pytest.mark.parametrize("file", FILES)
def test_a_named_file_exists(file: str) -> None:
    assert (SOURCE / file).exists() or (SOURCE.parents[1] / file).exists()
