"""./dev mutate: run the tests against mutants of packages and print the share that they detect."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tools.mutants.coverage_map import IMPORT, OUTPUT, SOURCE
from tools.mutants.fork_server import ROOT, ForkServer, Outcome, TextMutant, replaced
from tools.mutants.operators import Mutant, mutants_of

PACKAGE = ROOT / "src" / "tidebook"
#: Tests that need no server: if only a server reveals a mutant, a unit test is missing. Tests of other packages are
#: left out, because they run the same lines for other purposes, and take most of the time.
TESTS = (
    *(f"tests/unit/{package}" for package in ("core", "journal", "store", "replication", "tags")),
    *("tests/model", "tests/simulation"),
    *(f"tests/conformance/test_embedded_{suite}.py" for suite in ("journal", "log", "store", "tags")),
)
DESELECTED = "not kafka and not cassandra and not postgres and not mariadb and not spark"
#: By default, the tests of one mutant take at most this many seconds; slow tests run last.
TEST_SECONDS_MAX = 40.0
TESTS_MAX = 400
#: The number of test modules that one process measures.
MEASURED_AT_ONCE = 12
#: Tests of a mutant's own package that are quicker than this run before all others.
NEAR_SECONDS_MAX = 1.0
#: A test that takes longer with a mutant than without, by this factor plus this time, is repeated after a run without
#: the mutant, because a busy machine must not count as a kill.
SLOWER_MAX = 4.0
LATE_SECONDS_MIN = 5.0
NAMED_SECONDS_MAX = 120.0
#: Rewriting the asserts of Tidebook, which is a pytest plugin, would import its modules before the mutant is in place.
PYTEST_OPTIONS = (
    *("-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist", "--hypothesis-seed=0", "--assert=plain"),
    *("-m", DESELECTED),
)
EQUIVALENTS = Path(__file__).with_name("equivalents.toml")
NAMED = Path(__file__).with_name("named.toml")
DEFAULT_PACKAGES = ("core", "journal", "store", "replication")


class Verdict(Enum):
    """The result of the tests on a mutant."""

    KILLED = "killed"
    SURVIVED = "survived"
    UNCOVERED = "not run"
    #: The tests did not detect it, and the list of equivalents says why none could.
    EQUIVALENT = "equivalent"
    #: The tests could not be run, so they neither passed nor failed.
    ERROR = "error"


@dataclass(frozen=True)
class CoverageData:
    """Maps each line to the tests that run it, with the duration of each test."""

    lines: Mapping[str, Mapping[str, Sequence[str]]]
    seconds: Mapping[str, float]
    #: The time limit for the tests of one mutant.
    seconds_max: float = TEST_SECONDS_MAX

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that run the mutant's line, within the time limit.

        Quick tests of the mutant's own module come first, then those of its package. Within each of these groups the
        quickest test of each test module comes first, then the second quickest of each: tests of different modules
        detect different mutants.
        """
        chosen: list[str] = []
        total = 0.0
        modules: dict[str, int] = {}
        turns: dict[str, int] = {}
        quickest = sorted(set(self._found(mutant)) - {IMPORT}, key=lambda test: (self.seconds.get(test, 0.0), test))
        for test in quickest:
            module = test.partition("::")[0]
            turns[test] = modules[module] = modules.get(module, 0) + 1
        for test in sorted(quickest, key=lambda test: (self._distance(test, mutant.path), turns[test])):
            total += self.seconds.get(test, 0.0)
            if chosen and (total > self.seconds_max or len(chosen) == TESTS_MAX):
                break
            chosen.append(test)
        return chosen

    def _distance(self, test: str, path: str) -> int:
        """Return the distance between a test and the mutant's module; slow tests have the greatest distance."""
        folder = f"tests/unit/{'/'.join(Path(path).parts[2:3])}/"
        if not test.startswith(folder) or self.seconds.get(test, 0.0) > NEAR_SECONDS_MAX:
            return 2
        return 0 if test.startswith(f"{folder}test_{Path(path).stem}") else 1

    def is_imported(self, mutant: Mutant) -> bool:
        """Return True if the line also runs outside tests: then the mutant must exist when its module is imported."""
        return IMPORT in self._found(mutant)

    def _found(self, mutant: Mutant) -> Sequence[str]:
        return self.lines.get(mutant.path, {}).get(str(mutant.line), ())


def main(arguments: Sequence[str]) -> int:
    """Run the mutants that the arguments name; return 0 if the required share is killed in every package."""
    options = _options(arguments)
    if options.named:
        return run_named(tomllib.loads(NAMED.read_text())["mutant"])
    modules = {name: sorted(_modules(name)) for name in options.packages}
    every = {
        name: [mutant for path in paths for mutant in mutants_of(str(path.relative_to(ROOT)), path.read_text())]
        for name, paths in modules.items()
    }
    chosen = {name: sample(mutants, options.sample, options.seed) for name, mutants in every.items()}
    run = list(dict.fromkeys(mutant for mutants in chosen.values() for mutant in mutants))
    random.Random(options.seed).shuffle(run)  # shuffled, so that any part of it is a random sample as well
    _say(f"{len(run):,} of {sum(map(len, every.values())):,} mutants, seed {options.seed}")
    ends_s = math.inf if options.minutes_max is None else time.monotonic() + 60 * options.minutes_max
    covered = _coverage(options.tests, options.seconds_max, refresh=options.refresh)
    files = [str(path.relative_to(ROOT)) for path in _test_files(options.tests)]
    state = _digest([*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *Path(__file__).parent.glob("*.py")])
    remembered = VerdictFile(ROOT / ".mutants" / f"verdicts-{state}-{options.seconds_max:g}.txt")
    verdicts = _run_all(run, covered, files, options.jobs, remembered, ends_s)
    if len(verdicts) < len(run):
        _say(f"{len(verdicts):,} of {len(run):,} were run: the same command continues from there")
    verdicts = without_equivalents(verdicts, equivalents(EQUIVALENTS.read_text()))
    for verdict in (Verdict.ERROR, Verdict.SURVIVED, Verdict.UNCOVERED, Verdict.EQUIVALENT):
        for mutant in run:
            if verdicts.get(mutant) is verdict:
                print(f"{verdict.value:<10} {mutant}")
    judged = {name: [mutant for mutant in mutants if mutant in verdicts] for name, mutants in chosen.items()}
    reports = {name: report(mutants, verdicts, len(every[name])) for name, mutants in judged.items() if mutants}
    for name, found in reports.items():
        print(json.dumps({"package": name, **found}), flush=True)
    return exit_code(reports, options.at_least) if len(verdicts) == len(run) else 3


def sample(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """Return a random sample of this many mutants, in their original order; all of them if `count` is 0."""
    if not 0 < count < len(mutants):
        return list(mutants)
    return [mutants[index] for index in sorted(random.Random(seed).sample(range(len(mutants)), count))]


def report(mutants: Sequence[Mutant], verdicts: Mapping[Mutant, Verdict], of: int) -> dict[str, float]:
    """Return the number of a package's mutants by verdict, and the share killed; errors count as not killed.

    `share` is the share of the mutants that are not listed as equivalent, `share_of_all` that of all mutants.
    """
    counts = Counter(verdicts[mutant] for mutant in mutants)
    found: dict[str, float] = {verdict.value.replace(" ", "_"): counts[verdict] for verdict in Verdict}
    killed, different = counts[Verdict.KILLED], len(mutants) - counts[Verdict.EQUIVALENT]
    shares = {"share": round(killed / max(1, different), 4), "share_of_all": round(killed / len(mutants), 4)}
    return {"mutants": len(mutants), "of": of, **found, **shares}


class Equivalent(NamedTuple):
    """A change after which no user, operator or test can distinguish the program from the current one."""

    path: str
    text: str
    change: str


def equivalents(text: str) -> set[Equivalent]:
    """Return the listed equivalents; raise `SystemExit` if an entry has no reason or is not in the sources."""
    found: set[Equivalent] = set()
    for entry in tomllib.loads(text).get("equivalent", []):
        listed = Equivalent(f"src/tidebook/{entry['path']}", entry["line"], entry["change"])
        source = ROOT / listed.path
        every = mutants_of(listed.path, source.read_text()) if source.exists() else []
        if not entry["reason"] or listed not in {Equivalent(each.path, each.text, each.change) for each in every}:
            raise SystemExit(f"dev: {EQUIVALENTS.name} has an entry without a reason or without a mutant: {listed}")
        found.add(listed)
    return found


def without_equivalents(verdicts: Mapping[Mutant, Verdict], listed: set[Equivalent]) -> dict[Mutant, Verdict]:
    """Return the verdicts, changed to equivalent for listed mutants that the tests did not kill."""
    return {
        mutant: Verdict.EQUIVALENT
        if verdict is Verdict.SURVIVED and Equivalent(mutant.path, mutant.text, mutant.change) in listed
        else verdict
        for mutant, verdict in verdicts.items()
    }


def exit_code(reports: Mapping[str, Mapping[str, float]], at_least: float) -> int:
    """Return 2 if a mutant could not be judged, 1 if a package is below the required share, and 0 otherwise."""
    if any(found["error"] for found in reports.values()):
        return 2
    return int(any(found["share"] < at_least for found in reports.values()))


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./dev mutate", description=__doc__)
    parser.add_argument("packages", nargs="*", default=DEFAULT_PACKAGES, help="packages or modules below src/tidebook")
    parser.add_argument(
        "--sample", type=int, default=0, help="run a random sample of this many of each package (0: all)"
    )
    parser.add_argument("--seed", type=int, default=1, help="the seed of the sample")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants that run at the same time")
    parser.add_argument("--at-least", type=float, default=0.9, help="the share to be killed in each package")
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="PATH", help="test files or folders to run")
    parser.add_argument(
        "--seconds-max", type=float, default=TEST_SECONDS_MAX, help="the time limit for the tests of a mutant"
    )
    parser.add_argument("--minutes-max", type=float, help="stop after this time; the same command continues from there")
    parser.add_argument("--named", action="store_true", help="run the mutants of named.toml, each against its test")
    parser.add_argument("--refresh", action="store_true", help="measure again which tests run which lines")
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
    """Return which tests run which lines; measure them once for each state of the sources and of a test module."""
    every = [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    shared = _digest(path for path in every if not path.name.startswith("test_"))
    caches = {path: ROOT / ".mutants" / f"{shared}-{_digest([path])}.json" for path in _test_files(tests)}
    missing = [path for path, cache in caches.items() if refresh or not cache.exists()]
    # In parts, so that an interrupted run keeps the finished ones.
    for first in range(0, len(missing), MEASURED_AT_ONCE):
        _say(f"measuring which lines the tests run: {len(missing) - first:,} modules left (minutes)")
        _measure({path: caches[path] for path in missing[first : first + MEASURED_AT_ONCE]})
    lines: dict[str, dict[str, list[str]]] = {}
    seconds: dict[str, float] = {}
    for cache in caches.values():
        loaded = json.loads(cache.read_text())
        seconds.update(loaded["seconds"])
        for path, by_line in loaded["lines"].items():
            into = lines.setdefault(path, {})
            for line, found in by_line.items():
                into.setdefault(line, []).extend(found)
    return CoverageData(lines, seconds, seconds_max)


def _test_files(tests: Sequence[str]) -> list[Path]:
    found: set[Path] = set()
    for test in tests:
        path = ROOT / test
        found.update(path.rglob("test_*.py") if path.is_dir() else [path])
    return sorted(found)


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(str(path.relative_to(ROOT)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _measure(caches: Mapping[Path, Path]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "map.json"
        variables = {**os.environ, OUTPUT: str(output), SOURCE: str(PACKAGE), "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-m", "pytest", *PYTEST_OPTIONS, "-p", "tools.mutants.coverage_map", "-q"]
        command += ["--timeout", "600", *map(str, caches)]
        subprocess.run(command, cwd=ROOT, env=variables, check=False, stdout=sys.stderr)
        measured = json.loads(output.read_text())
    for path, part in parts_of(measured, [str(path.relative_to(ROOT)) for path in caches]).items():
        caches[ROOT / path].parent.mkdir(exist_ok=True)
        caches[ROOT / path].write_text(json.dumps(part))


def parts_of(measured: Mapping[str, Any], modules: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the part of a map for each test module; lines that run outside tests belong to all parts."""
    parts: dict[str, dict[str, Any]] = {module: {"lines": {}, "seconds": {}} for module in modules}
    for test, seconds in measured["seconds"].items():
        parts[test.split("::")[0]]["seconds"][test] = seconds
    for path, by_line in measured["lines"].items():
        relative = str(Path(path).relative_to(ROOT))
        for line, tests in by_line.items():
            for test in tests:
                for module in modules if test == IMPORT else [test.split("::")[0]]:
                    parts[module]["lines"].setdefault(relative, {}).setdefault(line, []).append(test)
    return parts


class Judge:
    """Runs mutants against their tests; each of its threads has its own fork server."""

    def __init__(self, covered: CoverageData, files: Sequence[str]) -> None:
        self._covered = covered
        self._files = files
        self._servers = threading.local()
        self._lock = threading.Lock()
        self._opened: list[ForkServer] = []
        self._controls: dict[str, bool] = {}

    def verdict(self, mutant: Mutant) -> Verdict:
        """Return the verdict of the tests that run the mutant's line."""
        if not (tests := self._covered.tests_of(mutant)):
            return Verdict.UNCOVERED
        found = self._verdict(partial(self._server().run, mutant), tests)
        # Code that runs while tests are loaded has run without the mutant, so passed tests prove nothing.
        if found is Verdict.KILLED or (found is not None and not self._covered.is_imported(mutant)):
            return found
        files = sorted({test.split("::")[0] for test in tests})
        server = ForkServer(files, mutant, options=PYTEST_OPTIONS)
        try:
            # A mutant that keeps a module from loading is killed: the other server has loaded the module.
            if not server.is_loaded:
                return Verdict.KILLED
            return self._verdict(partial(server.run, None), tests) or Verdict.ERROR
        finally:
            server.close()

    def close(self) -> None:
        """End the servers."""
        for server in self._opened:
            server.close()

    def _verdict(self, run: RunTests, tests: Sequence[str]) -> Verdict | None:
        return judge(run, partial(self._server().run, None), tests, self._covered.seconds, self._controls)

    def _server(self) -> ForkServer:
        server: ForkServer | None = getattr(self._servers, "server", None)
        if server is None:
            server = self._servers.server = ForkServer(self._files, options=PYTEST_OPTIONS)
            if not server.is_loaded:
                raise SystemExit("dev: the tests cannot be loaded without a mutant")
            with self._lock:
                self._opened.append(server)
        return server


#: Runs tests, each within its limit in seconds, or without limits.
RunTests = Callable[[Sequence[str], Sequence[float] | None], Outcome]


def judge(
    mutant: RunTests, control: RunTests, tests: Sequence[str], seconds: Mapping[str, float], controls: dict[str, bool]
) -> Verdict | None:
    """Return the verdict of tests on a mutant, or None if it cannot be run in this way.

    `seconds` has the duration of each test without the mutant. A test that fails is run without the mutant too, once
    for all mutants (`controls`), and does not count if it fails there. One that does not end in time runs again
    without the mutant, under the current load, and then once more with the mutant, with a limit derived from that
    control run.
    """
    left = [test for test in tests if controls.get(test, True)]
    limits_s = [LATE_SECONDS_MIN + SLOWER_MAX * seconds.get(test, 0.0) for test in left]
    controlled: set[str] = set()
    while left:
        outcome = mutant(left, limits_s)
        if outcome.unfit:
            return None
        if outcome.broken:
            return Verdict.ERROR
        at = len(outcome.seconds)
        if outcome.failed is not None:
            test = outcome.failed
            if test not in controls:
                controls[test] = control([test], None).failed is None
            if controls[test]:
                return Verdict.KILLED
            left, limits_s = left[at:], limits_s[at:]
        elif outcome.late is not None:
            if outcome.late in controlled:
                return Verdict.KILLED
            controlled.add(outcome.late)
            found = control([outcome.late], None)
            if found.failed is not None or not found.seconds:
                return Verdict.ERROR
            left = left[at:]
            limits_s = [LATE_SECONDS_MIN + SLOWER_MAX * found.seconds[0], *limits_s[at + 1 :]]
        else:
            return Verdict.SURVIVED
    return Verdict.SURVIVED


def run_named(mutants: Sequence[Mapping[str, str]]) -> int:
    """Run each handwritten mutant against the test that must fail; return 1 if a test does not."""
    survived = 0
    for each in mutants:
        module, test = each["test"].split("::")[0], each["test"]
        mutant = TextMutant(f"src/tidebook/{each['path']}", each["old"], each["new"])
        replaced((ROOT / mutant.path).read_text(), mutant.old, mutant.new)
        found: list[bool] = []
        for change in (None, mutant):
            server = ForkServer([module], change, options=PYTEST_OPTIONS)
            try:
                tests = [each for each in server.tests if each == test or each.startswith(f"{test}[")]
                if not tests:
                    raise SystemExit(f"dev: there is no test {test}")
                found.append(server.run(None, tests, [NAMED_SECONDS_MAX] * len(tests)).failed is not None)
            finally:
                server.close()
        verdict = "killed" if found == [False, True] else "fails anyway" if found[0] else "survived"
        survived += verdict != "killed"
        print(f"{verdict:<12} {each['name']}: {test}", flush=True)
    return int(survived > 0)


class VerdictFile:
    """The verdicts of one state of the sources and tests, so that a run can continue where an earlier one ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._known = {line.rpartition(" ")[0]: Verdict[line.rpartition(" ")[2]] for line in lines}

    def get(self, mutant: Mutant) -> Verdict | None:
        """Return the verdict on a mutant, if it has one."""
        return self._known.get(f"{mutant.path} {mutant.index}")

    def add(self, mutant: Mutant, verdict: Verdict) -> None:
        """Add a verdict; the next run retries errors."""
        if verdict is not Verdict.ERROR:
            with self._path.open("a") as file:
                file.write(f"{mutant.path} {mutant.index} {verdict.name}\n")


def _run_all(
    mutants: Sequence[Mutant],
    covered: CoverageData,
    files: Sequence[str],
    jobs: int,
    remembered: VerdictFile,
    ends_s: float,
) -> dict[Mutant, Verdict]:
    verdicts = {mutant: known for mutant in mutants if (known := remembered.get(mutant)) is not None}
    lock = threading.Lock()
    started, before = time.monotonic(), len(verdicts)
    judging = Judge(covered, files)

    def run(mutant: Mutant) -> None:
        if mutant in verdicts or time.monotonic() > ends_s:
            return
        verdict = judging.verdict(mutant)
        with lock:
            remembered.add(mutant, verdict)
            verdicts[mutant] = verdict
            if verdict is not Verdict.KILLED:
                _say(f"{verdict.value} {mutant}")
            if (done := len(verdicts)) % 20 == 0:
                killed = sum(verdict is Verdict.KILLED for verdict in verdicts.values())
                left_min = (time.monotonic() - started) / (done - before) * (len(mutants) - done) / 60
                _say(f"{done:,} of {len(mutants):,}, {killed / done:.1%} killed, {left_min:.0f} min left")

    try:
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(run, mutants))
    finally:
        judging.close()
    return verdicts


def _say(text: str) -> None:
    print(f"mutate: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
