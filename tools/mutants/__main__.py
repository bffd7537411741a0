"""./dev mutate: run the tests against mutants of packages and print the share that they notice."""

from __future__ import annotations

import argparse
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

from tools.mutants.coverage_map import OUTPUT, SOURCE
from tools.mutants.operators import Mutant, mutants_of, mutated

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "src" / "tidebook"
#: The tests that need no server: a mutant that only a server could reveal is a missing unit test.
TESTS = ("tests/unit", "tests/model", "tests/simulation", "tests/conformance")
DESELECTED = "not kafka and not cassandra and not postgres and not mariadb and not spark"
#: Slow tests are tried last, and by default no more than this many seconds of tests are run against one mutant.
TEST_SECONDS_MAX = 40.0
TESTS_MAX = 400
#: A mutant that takes longer than its tests did without it, by this factor and this start-up time, is run again after a
#: control run: a busy machine must not count as a kill.
SLOWER_MAX = 4.0
START_SECONDS_MAX = 30.0
DEFAULT_PACKAGES = ("core", "journal", "store", "replication")


class Verdict(Enum):
    """What the tests said of a mutant."""

    KILLED = "killed"
    SURVIVED = "survived"
    UNCOVERED = "not run"
    #: The tests could not be run: neither a failure nor a success of theirs.
    ERROR = "error"


#: pytest's exit codes; all others say nothing about the mutant (an interrupt, a wrong test id, a crash, no tests).
_VERDICTS = {0: Verdict.SURVIVED, 1: Verdict.KILLED}


@dataclass(frozen=True)
class CoverageData:
    """Maps each line to the tests that run it, with the duration of each test."""

    lines: dict[str, dict[str, list[str]]]
    seconds: dict[str, float]
    #: How long the tests of one mutant may take.
    seconds_max: float = TEST_SECONDS_MAX
    #: Tests that fail without a mutant, and would seem to kill every one.
    failed: frozenset[str] = frozenset()

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that run the mutant's line, quickest first, within the time limit."""
        found = self.lines.get(str(ROOT / mutant.path), {}).get(str(mutant.line), [])
        chosen: list[str] = []
        total = 0.0
        for test in sorted(set(found) - self.failed, key=lambda test: (self.seconds.get(test, 0.0), test)):
            total += self.seconds.get(test, 0.0)
            if chosen and (total > self.seconds_max or len(chosen) == TESTS_MAX):
                break
            chosen.append(test)
        return chosen


def main(arguments: Sequence[str]) -> int:
    """Run the mutants that the arguments name; return 1 if a package has fewer than the required share killed."""
    options = _options(arguments)
    if options.child:
        return _run_child(sys.stdin.read())
    modules = {name: sorted(_modules(name)) for name in options.packages}
    every = {
        name: [mutant for path in paths for mutant in mutants_of(str(path.relative_to(ROOT)), path.read_text())]
        for name, paths in modules.items()
    }
    chosen = {name: sample(mutants, options.sample, options.seed) for name, mutants in every.items()}
    run = list(dict.fromkeys(mutant for mutants in chosen.values() for mutant in mutants))
    _say(f"{len(run):,} of {sum(map(len, every.values())):,} mutants, seed {options.seed}")
    covered = _coverage(options.tests, options.seconds_max, refresh=options.refresh)
    covered = _controlled(covered, run)
    verdicts = _run_all(run, covered, options.jobs)
    for verdict in (Verdict.ERROR, Verdict.SURVIVED, Verdict.UNCOVERED):
        for mutant in run:
            if verdicts[mutant] is verdict:
                print(f"{verdict.value:<9} {mutant}")
    reports = {name: report(mutants, verdicts, len(every[name])) for name, mutants in chosen.items()}
    for name, found in reports.items():
        print(json.dumps({"package": name, **found}))
    return exit_code(reports, options.at_least)


def sample(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return so many of the mutants, chosen at random and in their order; all of them if `count` is 0."""
    if not 0 < count < len(mutants):
        return list(mutants)
    return [mutants[index] for index in sorted(random.Random(seed).sample(range(len(mutants)), count))]


def report(mutants: Sequence[Mutant], verdicts: Mapping[Mutant, Verdict], of: int) -> dict[str, float]:
    """Return how many of a package's mutants came to what, and the share killed; errors count as not killed."""
    counts = Counter(verdicts[mutant] for mutant in mutants)
    found: dict[str, float] = {verdict.value.replace(" ", "_"): counts[verdict] for verdict in Verdict}
    return {"mutants": len(mutants), "of": of, **found, "share": round(counts[Verdict.KILLED] / len(mutants), 4)}


def exit_code(reports: Mapping[str, Mapping[str, float]], at_least: float) -> int:
    """Return 2 if a mutant could not be judged, 1 if a package is below the required share, and 0 otherwise."""
    if any(found["error"] for found in reports.values()):
        return 2
    return int(any(found["share"] < at_least for found in reports.values()))


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev mutate", description=__doc__)
    parser.add_argument("packages", nargs="*", default=DEFAULT_PACKAGES, help="packages or modules below src/tidebook")
    parser.add_argument("--sample", type=int, default=0, help="run a random sample of so many of each package (0: all)")
    parser.add_argument("--seed", type=int, default=1, help="the seed of the sample")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants that run at the same time")
    parser.add_argument("--at-least", type=float, default=0.9, help="the share to be killed in each package")
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="PATH", help="test files or folders to run")
    parser.add_argument("--seconds-max", type=float, default=TEST_SECONDS_MAX, help="how long its tests may take")
    parser.add_argument("--refresh", action="store_true", help="measure again which tests run which lines")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _modules(name: str) -> Iterable[Path]:
    found = PACKAGE / name
    if found.is_dir():
        return [path for path in found.rglob("*.py") if path.name != "__init__.py"]
    module = found if found.suffix == ".py" else found.with_suffix(".py")
    if not module.exists():
        raise SystemExit(f"dev: there is no package or module {name} below src/tidebook")
    return [module]


def _coverage(tests: Sequence[str], seconds_max: float, *, refresh: bool) -> CoverageData:
    """Return which tests run which lines; measure it once for each state of sources and tests."""
    digest = hashlib.sha256(" ".join(tests).encode())
    for path in sorted([*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]):
        digest.update(path.read_bytes())
    cache = ROOT / ".mutants" / f"{digest.hexdigest()[:16]}.json"
    if refresh or not cache.exists():
        cache.parent.mkdir(exist_ok=True)
        _say("measuring which tests run which lines (minutes)")
        variables = {**os.environ, OUTPUT: str(cache), SOURCE: str(PACKAGE), "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-m", "pytest", *_pytest_options(), "-p", "tools.mutants.coverage_map", "-q"]
        command += ["-m", DESELECTED, "--timeout", "600", *[test for test in tests if (ROOT / test).exists()]]
        subprocess.run(command, cwd=ROOT, env=variables, check=False, stdout=sys.stderr)
    loaded = json.loads(cache.read_text())
    return CoverageData(loaded["lines"], loaded["seconds"], seconds_max)


def _pytest_options() -> list[str]:
    # Rewriting the asserts of Tidebook, which is a plugin of pytest, would import its modules in front of the mutant.
    return ["-p", "no:cacheprovider", "-p", "no:randomly", "--hypothesis-seed=0", "-p", "no:xdist", "--assert=plain"]


def _controlled(covered: CoverageData, mutants: Sequence[Mutant]) -> CoverageData:
    """Run the tests of all mutants once without a mutant, and return how long each takes and which ones fail."""
    tests = sorted({test for mutant in mutants for test in covered.tests_of(mutant)})
    if not tests:
        return covered
    _say(f"control run of {len(tests):,} tests without a mutant")
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "control.json"
        code = run_tests(None, tests, limit_s=None, outcome=found)
        if code not in _VERDICTS:
            raise SystemExit(f"dev: the tests cannot be run without a mutant: pytest ended with {code}")
        outcome = json.loads(found.read_text())
    for test in outcome["failed"]:
        _say(f"fails without a mutant: {test}")
    return CoverageData(covered.lines, outcome["seconds"], covered.seconds_max, frozenset(outcome["failed"]))


def _run_all(mutants: Sequence[Mutant], covered: CoverageData, jobs: int) -> dict[Mutant, Verdict]:
    verdicts: dict[Mutant, Verdict] = {}
    lock = threading.Lock()
    started = time.monotonic()

    def run(mutant: Mutant) -> None:
        tests = covered.tests_of(mutant)
        seconds = sum(covered.seconds.get(test, 0.0) for test in tests)
        found = judge(partial(run_tests, mutant, tests), partial(run_tests, None, tests), seconds) if tests else None
        with lock:
            verdict = verdicts[mutant] = found or Verdict.UNCOVERED
            if verdict is not Verdict.KILLED:
                _say(f"{verdict.value} {mutant}")
            if (done := len(verdicts)) % 20 == 0:
                killed = sum(verdict is Verdict.KILLED for verdict in verdicts.values())
                left_min = (time.monotonic() - started) / done * (len(mutants) - done) / 60
                _say(f"{done:,} of {len(mutants):,}, {killed / done:.1%} killed, {left_min:.0f} min left")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, mutants))
    return verdicts


#: Runs tests within a limit in seconds, and returns pytest's exit code, or None if they did not end in time.
RunTests = Callable[[float | None], int | None]


def judge(mutant: RunTests, control: RunTests, seconds: float) -> Verdict:
    """Return the verdict on a mutant whose tests took `seconds` without it.

    If they do not end in time, the same tests run again without the mutant, as busy as the machine is now, and then
    once more with it, with a limit that follows from the time of that control run.
    """
    code = mutant(START_SECONDS_MAX + SLOWER_MAX * seconds)
    if code is None:
        began = time.monotonic()
        if control(None) != 0:
            return Verdict.ERROR
        code = mutant(START_SECONDS_MAX + SLOWER_MAX * (time.monotonic() - began))
        if code is None:
            return Verdict.KILLED
    return _VERDICTS.get(code, Verdict.ERROR)


def run_tests(
    mutant: Mutant | None, tests: Sequence[str], limit_s: float | None, outcome: Path | None = None
) -> int | None:
    """Run tests in a child process; return pytest's exit code, or None if they did not end in time."""
    change = None if mutant is None else {"path": mutant.path, "index": mutant.index}
    task = {"mutant": change, "tests": tests, "outcome": None if outcome is None else str(outcome)}
    quiet = subprocess.DEVNULL
    child = subprocess.Popen(
        [sys.executable, "-m", "tools.mutants", "--child"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=quiet,
        stderr=quiet,
        start_new_session=True,
    )
    try:
        child.communicate(json.dumps(task).encode(), timeout=limit_s)
        return child.returncode
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end_group(child)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # the process and its children have ended
    child.wait()


class _MutantFinder(MetaPathFinder):
    """Imports one module from its mutated tree; all others are imported normally."""

    def __init__(self, path: Path, index: int) -> None:
        self._path = path
        self._code = compile(mutated(path.read_text(), index), str(path), "exec")
        parts = path.relative_to(ROOT / "src").with_suffix("").parts
        self._name = ".".join(parts)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the mutant's spec if its module is imported."""
        if fullname != self._name:
            return None
        code = self._code

        class Loader(importlib.machinery.SourceFileLoader):
            def get_code(self, fullname: str) -> types.CodeType:
                return code

        return importlib.util.spec_from_loader(fullname, Loader(fullname, str(self._path)), is_package=False)


class _Outcome:
    """Records which tests failed, how long each took, and whether a module of tests could not be loaded."""

    def __init__(self) -> None:
        self.unloadable = False
        self.failed: set[str] = set()
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        self.unloadable = self.unloadable or report.failed


def _run_child(text: str) -> int:
    import pytest

    task = json.loads(text)
    if (mutant := task["mutant"]) is not None:
        sys.meta_path.insert(0, _MutantFinder(ROOT / mutant["path"], mutant["index"]))
    recorded = _Outcome()
    stop = [] if task["outcome"] else ["-x"]
    code = int(pytest.main([*_pytest_options(), *stop, "-q", "--no-header", *task["tests"]], plugins=[recorded]))
    if task["outcome"]:
        outcome = {"failed": sorted(recorded.failed), "seconds": recorded.seconds}
        Path(task["outcome"]).write_text(json.dumps(outcome))
    # A module that fails while it loads is a failed test, if it is the mutant that fails it; pytest then says 4, as it
    # does of a test that does not exist.
    return int(pytest.ExitCode.TESTS_FAILED) if mutant is not None and recorded.unloadable else code


def _say(text: str) -> None:
    print(f"mutate: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
