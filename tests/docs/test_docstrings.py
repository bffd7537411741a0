"""Every example in a docstring of the source runs, and gives the result that is printed below it."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
FLAGS = doctest.ELLIPSIS
MODULES = sorted(
    ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for file in SOURCE.rglob("*.py")
    if ">>>" in file.read_text()
)


def examples(module: str) -> list[doctest.DocTest]:
    """Return the examples of a module, which doctest finds in the functions and classes that are defined there."""
    return [each for each in doctest.DocTestFinder().find(importlib.import_module(module)) if each.examples]


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_a_module_give_the_printed_results(module: str) -> None:
    runner = doctest.DocTestRunner(verbose=False, optionflags=FLAGS)
    report: list[str] = []
    for each in examples(module):
        runner.run(each, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


@pytest.mark.parametrize("module", MODULES)
def test_no_example_is_overlooked(module: str) -> None:
    """Doctest skips what is wrapped or renamed, and would report nothing."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)]
    written = sum(len(re.findall(r"^\s*>>> ", text, re.MULTILINE)) for text in docstrings)
    assert sum(len(each.examples) for each in examples(module)) == written
