"""The implementation of each command of ./dev."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import TextIO

from tools import build, chromium, docs, environment, fuzzing, java, supply_chain
from tools.environment import PYTHON, ROOT, SetupError, refuse, say

HOME = ROOT / ".servers"
#: Linux's file system in memory, and the free space that a test run needs to use it.
MEMORY = Path("/dev/shm")
MEMORY_BYTES_MIN = 8 * 1024**3
FOLDER_PREFIX = "tidebook-test-"
SERVERS = ["-m", "tidebook.testing.servers"]
SERVER_NAMES = ("kafka", "cassandra", "postgres", "mariadb")
#: The servers of each benchmark; benchmarks that are not listed need none, or start their own.
BENCH_SERVERS = {
    "all": ("kafka", "cassandra", "postgres"),
    "cassandra": ("cassandra",),
    "domain": ("kafka", "cassandra", "postgres"),
    "kafka": ("kafka", "cassandra"),
    "outbox": ("kafka", "postgres"),
    "pipeline": ("kafka", "cassandra"),
    "queue": ("postgres",),
    "tags": ("cassandra",),
}
#: Run tests in parallel, because they mostly wait for servers; `-n 0` turns it off for a debugger. A worker that dies
#: ends the run: otherwise pytest-xdist would start a new one, repeat the test, and finally hang.
IN_PARALLEL = ("-n", "4", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0")
#: The options of a run of all tests.
FULL_RUN = ("--cache-clear", "--processor-time")
#: Plugins that each process would need half a second to load, and that only tests with a server use.
UNUSED_PLUGINS = ("-p", "no:schemathesis")
#: pytest's exit code for failed tests, but not for a run that was interrupted or could not start.
TESTS_FAILED = 1
#: Up to this many failures of a full run may be due to a busy machine: these tests are listed, and repeated alone.
RETRIED_TESTS_MAX = 5


def up(arguments: list[str]) -> int:
    """Run Tidebook with an embedded book."""
    environment.ensure("all" if "--demo" in arguments else "base")  # the demo uses SQLAlchemy and, if available, Spark
    return _python("-m", "tidebook.cli", "up", *arguments)


def setup(arguments: list[str]) -> int:
    """Install all extras and the development tools."""
    if arguments:
        return refuse("setup takes no argument")
    environment.ensure("dev")
    return 0


def check(arguments: list[str]) -> int:
    """Run every check that needs no server, with unit tests and static checks in parallel, and report all failures."""
    environment.ensure("dev")
    static = {
        "format": ["-m", "ruff", "format", "--check", "."],
        "lint": ["-m", "ruff", "check", "."],
        "import contracts": ["-c", "from importlinter.cli import lint_imports_command as run; run()"],
        "types": ["-m", "mypy"],
    }
    unit = ["-m", "pytest", "-q", "-n", "4", "--dist", "worksteal", *UNUSED_PLUGINS]
    unit += arguments or ["tests/unit", "tests/tidy"]
    with test_folder() as folder, ThreadPoolExecutor(1) as pool:
        testing = pool.submit(_python, *unit, variables=environment.variables() | {"TMPDIR": str(folder)})
        results = {name: _captured(step) for name, step in static.items()}
        unit_code = testing.result()
    failed = [name for name, (code, _) in results.items() if code != 0]
    for name in failed:
        print(f"dev: {name}\n{results[name][1]}", flush=True)
    if unit_code != 0:
        failed.append("unit tests")
    say(f"failed: {', '.join(failed)}" if failed else "all checks passed")
    return 1 if failed else 0


def _captured(step: list[str]) -> tuple[int, str]:
    """Run a step of .venv's Python; return its exit code and its output, which must not mix with other output."""
    run = subprocess.run(
        [str(PYTHON), *step], cwd=ROOT, env=environment.variables(), text=True, capture_output=True, check=False
    )
    return run.returncode, run.stdout + run.stderr


def test(arguments: list[str]) -> int:
    """Run all tests against real servers, and always stop the servers afterwards."""
    without, rest = _take_without(arguments)
    if unknown := set(without) - set(SERVER_NAMES):
        return refuse(f"--without accepts {', '.join(SERVER_NAMES)} or all, not {', '.join(sorted(unknown))}")
    _install_with_java()
    if chromium.is_needed(rest):
        chromium.ensure()
    _end_at_first_signal()
    with (
        test_folder() as folder,
        server_home([name for name in SERVER_NAMES if name not in without], parent=folder) as home,
    ):
        server_variables = {"TIDEBOOK_SERVERS": str(home / "status.json"), "TIDEBOOK_WITHOUT": ",".join(without)}
        temporary = {"TMPDIR": str(folder), "SPARK_LOCAL_DIRS": str(folder)}
        variables = environment.variables() | server_variables | temporary
        code = _python("-m", "pytest", *IN_PARALLEL, *(rest or FULL_RUN), variables=variables)
        failed = _failed_tests() if code == TESTS_FAILED and not rest else []
        if not 0 < len(failed) <= RETRIED_TESTS_MAX:
            return code
        say(f"{len(failed)} failed together with other tests, and are repeated alone: {', '.join(failed)}")
        return _python("-m", "pytest", "-n", "0", *failed, variables=variables)


def _failed_tests() -> list[str]:
    """Return the tests that failed in the last run."""
    file = ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"
    return [*json.loads(file.read_text())] if file.exists() else []


@contextlib.contextmanager
def test_folder() -> Iterator[Path]:
    """Yield a folder for the files of a test run, in memory if there is room, and remove it at the end.

    Tests and their servers sync thousands of small writes, which memory makes fast. When a process is killed, the files
    survive as on a disk.
    """
    _sweep()
    in_memory = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= MEMORY_BYTES_MIN
    folder = (MEMORY if in_memory else HOME) / f"{FOLDER_PREFIX}{os.getpid()}"
    folder.mkdir(parents=True)
    folder.chmod(0o755)  # PostgreSQL runs as another user
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def server_home(names: list[str], *options: str, parent: Path = HOME) -> Iterator[Path]:
    """Yield the home folder of running servers: `.servers` if all of them run there, otherwise a temporary one."""
    _sweep()
    if not names:
        yield HOME
        return
    if _run_servers("status", names, HOME, quiet=True) == 0:
        say("using the servers that are already running")
        yield HOME
        return
    home = parent / f"{FOLDER_PREFIX}{os.getpid()}"
    try:
        if _run_servers("start", names, home, *options) != 0:
            raise SetupError(
                "a server did not start (see above). "
                "With ./dev test --without NAME it is not started, and its tests are reported as skipped"
            )
        yield home
    finally:
        if home.exists():
            _run_servers("stop", [*SERVER_NAMES], home, "--remove")
            shutil.rmtree(home, ignore_errors=True)


def _sweep() -> None:
    """Stop and remove the servers of an earlier run that was killed."""
    for home in [*HOME.glob(f"{FOLDER_PREFIX}*"), *MEMORY.glob(f"{FOLDER_PREFIX}*")]:
        owner = int(home.name.removeprefix(FOLDER_PREFIX))
        try:
            os.kill(owner, 0)
        except ProcessLookupError:
            inside = home / home.name  # the servers of a test run
            _run_servers("stop", [*SERVER_NAMES], inside if inside.exists() else home, "--remove")
            shutil.rmtree(home, ignore_errors=True)


def _run_servers(command: str, names: list[str], home: Path, *options: str, quiet: bool = False) -> int:
    arguments = [*SERVERS, command, "--only", ",".join(names), "--home", str(home), *options]
    return _python(*arguments, output=subprocess.DEVNULL if quiet else sys.stderr, in_session=True)


def servers(arguments: list[str]) -> int:
    """Start, stop or show the real servers."""
    _install_with_java()
    _end_at_first_signal()
    return _python(*SERVERS, *arguments, in_session=True)


def bench(arguments: list[str]) -> int:
    """Run one benchmark, on new servers unless some are running; its last line is one JSON object."""
    _install_with_java()
    runs_nothing = {argument.partition("=")[0] for argument in arguments} & {"--report", "--add"}
    if arguments[:1] == ["console"] or (arguments[:1] == ["all"] and not runs_nothing):
        chromium.ensure()
    _end_at_first_signal()
    with server_home(bench_servers(arguments), "--profile", "bench") as home:
        if home == HOME and bench_servers(arguments):
            say("figures are only valid if these were started with --profile bench")
        server_variables = {"TIDEBOOK_SERVERS": os.environ.get("TIDEBOOK_SERVERS") or str(home / "status.json")}
        variables = environment.variables() | server_variables
        return _python("-m", "bench", *arguments, variables=variables, in_session=True)


def mutate(arguments: list[str]) -> int:
    """Run mutants of packages against the tests that need no server, and print the share that was killed."""
    environment.ensure("dev")
    return _python("-m", "tools.mutants", *arguments)


def faults(arguments: list[str]) -> int:
    """Run the workload under faults, check its history, and write a report; return 0 if all rules hold."""
    environment.ensure("dev")
    _end_at_first_signal()
    return _python("-m", "faults", *arguments, in_session=True)


def bench_servers(arguments: list[str]) -> list[str]:
    """Return the servers to start: none if the arguments name servers or ask for help."""
    words = {word for argument in arguments for word in argument.split("=")}
    if words & {"--book", "--address", "--help", "-h", "--report", "--add"} or os.environ.get("TIDEBOOK_SERVERS"):
        return []
    if "console" in words:  # the book of the benchmark is embedded by default
        return [*SERVER_NAMES[:3]] if "--servers" in words else []
    if "tags" in words and not words & {"cassandra", "both"}:  # the store of the benchmark is embedded by default
        return []
    return [*BENCH_SERVERS.get(arguments[0] if arguments else "", ())]


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "up": up,
    "test": test,
    "setup": setup,
    "check": check,
    "bench": bench,
    "mutate": mutate,
    "faults": faults,
    "fuzz": fuzzing.fuzz,
    "sbom": supply_chain.sbom,
    "audit": supply_chain.audit,
    "servers": servers,
    "build": build.build,
    "docs": docs.docs,
}


def _install_with_java() -> None:
    with ThreadPoolExecutor(1) as pool:
        finding = pool.submit(java.ensure)
        environment.ensure("dev")
        os.environ["JAVA_HOME"] = str(finding.result())


def _python(
    *arguments: str,
    variables: dict[str, str] | None = None,
    output: int | TextIO | None = None,
    in_session: bool = False,
) -> int:
    """Run .venv's Python and return its exit code; the child handles an interrupt itself.

    With `in_session`, the child has a separate session, so that a signal reaches it once, from this process. After an
    interrupt, processes that it has left in this session are killed.
    """
    inside = variables or environment.variables()
    process = subprocess.Popen(
        [str(PYTHON), *arguments], cwd=ROOT, env=inside, stdout=output, start_new_session=in_session
    )
    try:
        return process.wait()
    except (KeyboardInterrupt, SystemExit) as error:
        from_terminal = isinstance(error, KeyboardInterrupt) or error.code == 128 + signal.SIGINT
        if in_session or not from_terminal:  # the terminal sends its interrupt to the child too
            process.send_signal(signal.SIGINT)  # pytest cleans up after SIGINT, but not after SIGTERM
        process.wait()
        if in_session:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        raise


def _take_without(arguments: list[str]) -> tuple[list[str], list[str]]:
    without: list[str] = []
    rest: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--without":
            without += next(remaining, "").split(",")
        elif argument.startswith("--without="):
            without += argument.removeprefix("--without=").split(",")
        else:
            rest.append(argument)
    return (list(SERVER_NAMES) if "all" in without else without), rest


def _end_at_first_signal() -> None:
    """Raise SystemExit at the first SIGINT or SIGTERM; later ones must not interrupt the stop of servers."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a script may have started this process with SIGINT ignored
        signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)
