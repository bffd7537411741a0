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
import threading
import time
import types
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path

from tools.mutants.coverage_map import OUTPUT, SOURCE
from tools.mutants.operators import Mutant, mutants_of, mutated

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "src" / "tidebook"
#: The tests that need no server: a mutant that only a server could reveal is a missing unit test.
TESTS = ("tests/unit", "tests/model", "tests/simulation", "tests/conformance")
DESELECTED = "not kafka and not cassandra and not postgres and not mariadb and not spark"
#: Slow tests are tried last, and no more than this many seconds of tests are run against one mutant.
TEST_SECONDS_MAX = 40.0
TESTS_MAX = 400
OVERHEAD_SECONDS = 15.0
DEFAULT_PACKAGES = ("core", "journal", "store", "replication")


@dataclass(frozen=True)
class CoverageData:
    """Maps each line to the tests that run it, with the duration of each test."""

    lines: dict[str, dict[str, list[str]]]
    seconds: dict[str, float]

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that run the mutant's line, quickest first, within the time limit."""
        found = self.lines.get(str(ROOT / mutant.path), {}).get(str(mutant.line), [])
        chosen: list[str] = []
        total = 0.0
        for test in sorted(found, key=lambda test: self.seconds.get(test, 0.0)):
            total += self.seconds.get(test, 0.0)
            if chosen and (total > TEST_SECONDS_MAX or len(chosen) == TESTS_MAX):
                break
            chosen.append(test)
        return chosen


def main(arguments: Sequence[str]) -> int:
    """Run the mutants that the arguments name; return 1 if fewer than the required share is killed."""
    options = _options(arguments)
    if options.child:
        return _run_child(sys.stdin.read())
    paths = sorted({path for name in options.packages for path in _modules(name)})
    every = [mutant for path in paths for mutant in mutants_of(str(path.relative_to(ROOT)), path.read_text())]
    covered = _coverage(options.tests, refresh=options.refresh)
    chosen = every
    if options.sample and options.sample < len(every):
        chosen = sorted(random.Random(options.seed).sample(every, options.sample), key=lambda mutant: str(mutant))
    _say(f"{len(chosen):,} of {len(every):,} mutants in {len(paths)} modules, seed {options.seed}")
    killed, survivors, uncovered = _run_all(chosen, covered, options.jobs)
    by_package: dict[str, list[int]] = {}
    for mutant, verdict in [*((m, 1) for m in killed), *((m, 0) for m in [*survivors, *uncovered])]:
        by_package.setdefault(_package_of(mutant), []).append(verdict)
    for mutant in survivors:
        print(f"survived  {mutant}")
    for mutant in uncovered:
        print(f"not run   {mutant}")
    share = len(killed) / len(chosen) if chosen else 1.0
    shares = {name: round(sum(found) / len(found), 4) for name, found in sorted(by_package.items())}
    result = {"mutants": len(chosen), "of": len(every), "killed": len(killed), "survived": len(survivors)}
    print(json.dumps({**result, "not_run": len(uncovered), "share": round(share, 4), "packages": shares}))
    return 0 if share >= options.at_least else 1


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="dev mutate", description=__doc__)
    parser.add_argument("packages", nargs="*", default=DEFAULT_PACKAGES, help="packages or modules below src/tidebook")
    parser.add_argument("--sample", type=int, default=0, help="run a random sample of this many mutants (0: all)")
    parser.add_argument("--seed", type=int, default=1, help="the seed of the sample")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants that run at the same time")
    parser.add_argument("--at-least", type=float, default=0.9, help="the share that must be killed for exit code 0")
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="PATH", help="test files or folders to run")
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


def _package_of(mutant: Mutant) -> str:
    return "/".join(Path(mutant.path).parts[2:-1])


def _coverage(tests: Sequence[str], *, refresh: bool) -> CoverageData:
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
    return CoverageData(loaded["lines"], loaded["seconds"])


def _pytest_options() -> list[str]:
    return ["-p", "no:cacheprovider", "-p", "no:randomly", "--hypothesis-seed=0", "-p", "no:xdist"]


def _run_all(
    mutants: Sequence[Mutant], covered: CoverageData, jobs: int
) -> tuple[list[Mutant], list[Mutant], list[Mutant]]:
    killed: list[Mutant] = []
    survivors: list[Mutant] = []
    uncovered: list[Mutant] = []
    lock = threading.Lock()
    started = time.monotonic()

    def run(mutant: Mutant) -> None:
        tests = covered.tests_of(mutant)
        verdict = uncovered if not tests else (killed if _is_killed(mutant, tests, covered) else survivors)
        with lock:
            verdict.append(mutant)
            done = len(killed) + len(survivors) + len(uncovered)
            if verdict is not killed:
                _say(f"{'survived' if tests else 'not run '} {mutant}")
            if done % 20 == 0:
                pace = (time.monotonic() - started) / done
                left_min = pace * (len(mutants) - done) / 60
                _say(f"{done:,} of {len(mutants):,}, {len(killed) / done:.1%} killed, {left_min:.0f} min left")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, mutants))
    return killed, survivors, uncovered


def _is_killed(mutant: Mutant, tests: list[str], covered: CoverageData) -> bool:
    """Run the tests in a child process; a run that does not end counts as killed."""
    task = json.dumps({"path": mutant.path, "index": mutant.index, "tests": tests}).encode()
    limit_s = OVERHEAD_SECONDS + 4 * sum(covered.seconds.get(test, 0.0) for test in tests)
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
        child.communicate(task, timeout=limit_s)
        return child.returncode != 0
    except subprocess.TimeoutExpired:
        return True
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


def _run_child(task: str) -> int:
    import pytest

    wanted = json.loads(task)
    sys.meta_path.insert(0, _MutantFinder(ROOT / wanted["path"], wanted["index"]))
    return int(pytest.main([*_pytest_options(), "-x", "-q", "--no-header", *wanted["tests"]]))


def _say(text: str) -> None:
    print(f"mutate: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
