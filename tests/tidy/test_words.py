"""Docstrings and comments use the words of docs/reference/glossary.md, and each class name is used once."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "tidebook"
FOLDERS = (SOURCE, *(ROOT / name for name in ("tests", "bench", "faults", "tools", "examples")))
#: Words to avoid, each with its replacement.
ODD = {
    "anew": "again",
    "anybody": "any client, process or user",
    "everybody": "every process or user",
    "go on": "continue",
    "goes on": "continues",
    "in the end": "at the end",
    "in vain": "needlessly",
    "mend": "repair",
    "mended": "repaired",
    "mends": "repairs",
    "newer tidebook": "newer version of Tidebook",
    "older tidebook": "older version of Tidebook",
    "owes": "has not returned yet",
    "present configuration": "current configuration",
    "present epoch": "current epoch",
    "present incarnation": "current incarnation",
    "somebody": "another process or user",
    "take it for": "mistake it for",
    "takes it for": "mistakes it for",
    "tell apart": "distinguish",
    "tells": "reports, returns or says",
    "told": "reported, returned or said",
    "told apart": "distinguished",
    "whoever": "the process that",
}
PATTERN = re.compile(rf"\b({'|'.join(ODD)})\b(?!\.\w)(?!`)", re.IGNORECASE)
#: Matches these words within the name of a function or class.
IN_A_NAME = re.compile(rf"^ *(?:async )?(?:def|class) (?:\w+_)?(?:{'|'.join(ODD)})(?:_\w+)?\(", re.MULTILINE)

CLASS = re.compile(r"^\s*class (\w+)", re.MULTILINE)


def sources(*folders: Path) -> Iterator[tuple[Path, str]]:
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            if file != Path(__file__).resolve():
                yield file, file.read_text(encoding="utf-8")


def texts_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comments and docstrings of a module with their lines."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and (docstring := ast.get_docstring(node)) is not None:
            yield getattr(node, "lineno", 1), docstring
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def test_docstrings_and_comments_use_the_words_of_the_field() -> None:
    odd = [
        f"{file.relative_to(ROOT)}:{line}: {found.group()} (say: {ODD[found.group().lower()]})"
        for file, source in sources(*FOLDERS)
        if PATTERN.search(source)  # most files have none, and parsing all would take seconds
        for line, text in texts_of(source)
        if (found := PATTERN.search(text))
    ]
    assert odd == []


def test_names_of_functions_and_classes_use_the_words_of_the_field() -> None:
    odd = [
        f"{file.relative_to(ROOT)}: {found.group().strip()}"
        for file, source in sources(*FOLDERS)
        for found in IN_A_NAME.finditer(source)
    ]
    assert odd == []


def test_no_two_classes_have_the_same_name() -> None:
    written = {file: CLASS.findall(source) for file, source in sources(SOURCE)}
    counts = Counter(name for names in written.values() for name in names)
    homes: dict[str, list[str]] = defaultdict(list)
    for file, names in written.items():
        if not any(counts[name] > 1 for name in names):
            continue
        for node in ast.walk(
            ast.parse(file.read_text(encoding="utf-8"))
        ):  # the pattern also finds classes in examples of docstrings
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(file.relative_to(SOURCE).as_posix())
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}
