"""A process that has loaded the tests and runs some of them in a fork, with or without a mutant.

Starting pytest and importing the tests takes longer than most tests; a fork skips both. The mutant replaces the code
of the functions that are already loaded.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib.machinery
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any, TextIO

import pytest

from tools.mutants.operators import Mutant, mutated

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = ROOT / "src"

Functions = Mapping[tuple[str, str, int], Sequence[types.FunctionType]]
#: Caches of functions, with results from when the tests were loaded.
FunctionCaches = Sequence["functools._lru_cache_wrapper[Any]"]


@dataclass(frozen=True)
class Outcome:
    """The results of the tests that a fork ran in order, until one failed or did not end in time."""

    #: The duration of each test that ended.
    seconds: list[float] = field(default_factory=list)
    #: The first test that failed.
    failed: str | None = None
    #: The test that did not end in time.
    late: str | None = None
    #: The fork ended without running all tests: it crashed, or a test does not exist.
    broken: bool = False
    #: The mutant cannot replace code that is loaded: it needs a process that imports it.
    unfit: bool = False


@dataclass(frozen=True)
class TextMutant:
    """A handwritten change, which replaces one text of a module by another."""

    path: str
    old: str
    new: str


class ForkServer:
    """The process that loads test modules, once, and forks for each request."""

    def __init__(
        self, tests: Sequence[str], mutant: Mutant | TextMutant | None = None, *, options: Sequence[str]
    ) -> None:
        """Start the process; if a mutant is given, the process imports it, and every run includes it."""
        self._folder = tempfile.TemporaryDirectory(prefix="mutants")
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        start = {
            "requests": requests,
            "answers": answers,
            "mutant": _arguments(mutant),
            "arguments": [*options, "-q", "--no-header", f"--basetemp={self._folder.name}/tests", *tests],
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.mutants.fork_server", json.dumps(start)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(requests, answers),
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
        os.close(requests)
        os.close(answers)
        self._writer = os.fdopen(self._requests, "w")
        self._reader = os.fdopen(self._answers)
        found = json.loads(self._reader.readline() or "null")
        #: Whether all test modules could be loaded, and their tests.
        self.is_loaded = found is not None
        self.tests: list[str] = found or []

    def run(self, mutant: Mutant | None, tests: Sequence[str], limits_s: Sequence[float] | None = None) -> Outcome:
        """Run tests in a fork until one fails or takes longer than its limit."""
        self._writer.write(
            json.dumps({"mutant": _arguments(mutant), "tests": list(tests), "limits_s": limits_s}) + "\n"
        )
        self._writer.flush()
        answer = self._reader.readline()
        return Outcome(**json.loads(answer)) if answer else Outcome(broken=True)

    def close(self) -> None:
        """End the process."""
        self._writer.close()
        self._reader.close()
        self._process.wait()
        self._folder.cleanup()


def _arguments(mutant: Mutant | TextMutant | None) -> list[str | int] | None:
    match mutant:
        case None:
            return None
        case Mutant(path, _, index):
            return [path, index]
        case TextMutant(path, old, new):
            return [path, old, new]


class MutantFinder(MetaPathFinder):
    """Imports one module with its mutation; all others are imported normally."""

    def __init__(self, path: str, *change: Any) -> None:
        """`change` is the index of a mutation, or a text of the module and its replacement."""
        self._path = ROOT / path
        source = self._path.read_text()
        tree = mutated(source, *change) if len(change) == 1 else ast.parse(replaced(source, *change))
        self._code = compile(tree, str(self._path), "exec")
        self.name = ".".join(self._path.relative_to(SOURCE).with_suffix("").parts)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the mutant's spec if its module is imported."""
        if fullname != self.name:
            return None
        code = self._code

        class Loader(importlib.machinery.SourceFileLoader):
            def get_code(self, fullname: str) -> types.CodeType:
                return code

        return importlib.util.spec_from_loader(fullname, Loader(fullname, str(self._path)), is_package=False)


def replaced(source: str, old: str, new: str) -> str:
    """Return the source with the text replaced; raise `LookupError` if it does not occur exactly once."""
    if source.count(old) != 1:
        raise LookupError(f"the text to replace occurs {source.count(old)} times: {old!r}")
    return source.replace(old, new)


def loaded_functions() -> Functions:
    """Return the functions of the sources that exist now, by file, name and line."""
    found: dict[tuple[str, str, int], list[types.FunctionType]] = {}
    for each in gc.get_objects():
        if isinstance(each, types.FunctionType) and each.__code__.co_filename.startswith(str(SOURCE)):
            found.setdefault(_identity(each.__code__), []).append(each)
    return found


def replace_code(functions: Functions, path: str, index: int) -> bool:
    """Replace the code of the functions that the mutant changes; return False if that is not possible."""
    file = ROOT / path
    source = file.read_text()
    before = _codes(compile(ast.parse(source), str(file), "exec"))
    after = _codes(compile(mutated(source, index), str(file), "exec"))
    replaced = False
    for identity, code in after.items():
        if code == before[identity]:
            continue
        for function in functions.get(identity, ()):
            if len(code.co_freevars) != len(function.__code__.co_freevars):
                return False
            function.__code__ = code
            replaced = True
    return replaced


def _codes(module: types.CodeType) -> dict[tuple[str, str, int], types.CodeType]:
    found: dict[tuple[str, str, int], types.CodeType] = {}
    todo = [module]
    while todo:
        code = todo.pop()
        found[_identity(code)] = code
        todo += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return found


def _identity(code: types.CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


class ForkingLoop:
    """A pytest plugin that forks for each request and runs the requested tests in the fork."""

    def __init__(self, requests: TextIO, answers: TextIO) -> None:
        self._requests = requests
        self._answers = answers
        self._unloadable = False
        self._failed = False
        self._seconds = 0.0
        self._memories: FunctionCaches = ()

    def pytest_collectreport(self, report: Any) -> None:
        self._unloadable = self._unloadable or report.failed

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._answer(None if self._unloadable else [item.nodeid for item in session.items])

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        functions = loaded_functions()
        self._memories = [each for each in gc.get_objects() if isinstance(each, functools._lru_cache_wrapper)]
        gc.collect()
        gc.freeze()  # garbage collection in a fork would copy the memory of all loaded objects
        for line in self._requests:
            request = json.loads(line)
            self._answer(self._run(items, functions, **request))
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._failed = self._failed or report.failed
        self._seconds += report.duration

    def _answer(self, answer: object) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def _run(
        self,
        items: Mapping[str, pytest.Item],
        functions: Functions,
        mutant: tuple[str, int] | None,
        tests: Sequence[str],
        limits_s: Sequence[float] | None,
    ) -> dict[str, object]:
        if any(test not in items for test in tests):
            return {"broken": True}
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            self._run_in_child(functions, mutant, [items[test] for test in tests], writing)
        os.close(writing)
        try:
            return _watch(reading, tests, limits_s)
        finally:
            os.close(reading)
            _end_group(child)

    def _run_in_child(
        self, functions: Functions, mutant: tuple[str, int] | None, items: Sequence[pytest.Item], writing: int
    ) -> None:
        try:
            os.setpgid(0, 0)
            for memory in self._memories:
                memory.cache_clear()
            if mutant is not None and not _apply(functions, *mutant):
                os.write(writing, b"unfit\n")
                return
            for item, following in zip(items, [*items[1:], None], strict=True):
                self._seconds = 0.0
                try:
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                except BaseException:  # an exit that the test did not expect, or a plugin that failed on its report
                    self._failed = True
                os.write(writing, f"{self._seconds:.4f} {int(self._failed)}\n".encode())
                if self._failed:
                    return
        finally:
            os._exit(0)


def _apply(functions: Functions, path: str, index: int) -> bool:
    finder = MutantFinder(path, index)
    if finder.name in sys.modules:
        return replace_code(functions, path, index)
    sys.meta_path.insert(0, finder)
    return True


def _watch(reading: int, tests: Sequence[str], limits_s: Sequence[float] | None) -> dict[str, object]:
    seconds: list[float] = []
    left = b""
    for at, test in enumerate(tests):
        ends = None if limits_s is None else time.monotonic() + limits_s[at]
        while b"\n" not in left:
            if not select.select([reading], [], [], None if ends is None else max(0.0, ends - time.monotonic()))[0]:
                return {"seconds": seconds, "late": test}
            if not (more := os.read(reading, 4096)):
                return {"seconds": seconds, "broken": True}
            left += more
        line, left = left.split(b"\n", 1)
        if line == b"unfit":
            return {"unfit": True}
        took, failed = line.split()
        seconds.append(float(took))
        if failed == b"1":
            return {"seconds": seconds, "failed": test}
    return {"seconds": seconds}


def _end_group(child: int) -> None:
    for end in (os.killpg, os.kill):
        try:
            end(child, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the process and its children have ended
    os.waitpid(child, 0)


def serve(text: str) -> None:
    """Load the tests and serve requests until there are no more."""
    start = json.loads(text)
    if start["mutant"] is not None:
        sys.meta_path.insert(0, MutantFinder(*start["mutant"]))
    with os.fdopen(start["requests"]) as requests, os.fdopen(start["answers"], "w") as answers:
        pytest.main(start["arguments"], plugins=[ForkingLoop(requests, answers)])


if __name__ == "__main__":
    serve(sys.argv[1])
