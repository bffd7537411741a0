"""What each command of ./dev does."""

from __future__ import annotations

import contextlib
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

from tools import environment, java
from tools.environment import PYTHON, ROOT, SetupError, say

HOME = ROOT / ".servers"
SERVERS = ["-m", "tidebook.testing.servers"]
SERVER_NAMES = ("kafka", "cassandra", "postgres", "mariadb")
#: What each benchmark runs on; those that are not named need none, or start their own.
BENCH_SERVERS = {
    "cassandra": ("cassandra",),
    "kafka": ("kafka", "cassandra"),
    "outbox": ("kafka", "postgres"),
    "pipeline": ("kafka", "cassandra"),
    "queue": ("postgres",),
    "tags": ("cassandra",),
}
#: Much of a test's time is waiting for a server. `-n 0` turns it off, for a debugger. A process that dies ends the run:
#: pytest-xdist would make a new one, run the same test there, and after some rounds wait for ever.
SIDE_BY_SIDE = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0")


def up(arguments: list[str]) -> int:
    """Run Tidebook with everything embedded."""
    environment.ensure("base")
    if not (ROOT / "src/tidebook/cli/app.py").exists():
        return _later("up")
    return _python("-m", "tidebook.cli.app", "up", *arguments)


def setup(arguments: list[str]) -> int:
    """Install all extras and the development tools."""
    if arguments:
        return _refuse("setup takes no argument")
    environment.ensure("dev")
    return 0


def check(arguments: list[str]) -> int:
    """Run every check that needs no server, and report all that fail."""
    environment.ensure("dev")
    steps = {
        "format": ["-m", "ruff", "format", "--check", "."],
        "lint": ["-m", "ruff", "check", "."],
        "types": ["-m", "mypy"],
        "import contracts": ["-c", "from importlinter.cli import lint_imports_command as run; run()"],
        "unit tests": ["-m", "pytest", "-q", *(arguments or _existing("tests/unit", "tests/tidy"))],
    }
    failed = []
    for name, step in steps.items():
        say(name)
        if _python(*step) != 0:
            failed.append(name)
    say(f"failed: {', '.join(failed)}" if failed else "all checks passed")
    return 1 if failed else 0


def test(arguments: list[str]) -> int:
    """Run every test against the real servers, which are stopped afterwards whatever happens."""
    without, rest = _take_without(arguments)
    if unknown := set(without) - set(SERVER_NAMES):
        return _refuse(f"--without takes {', '.join(SERVER_NAMES)} or all, not {', '.join(sorted(unknown))}")
    _install_with_java()
    signal.signal(signal.SIGTERM, _terminate)
    with server_home([name for name in SERVER_NAMES if name not in without]) as home:
        told = {"TIDEBOOK_SERVERS": str(home / "status.json"), "TIDEBOOK_WITHOUT": ",".join(without)}
        # Tests start hundreds of processes: where PYTHONDONTWRITEBYTECODE is set, each would compile all of it anew.
        _python("-m", "compileall", "-q", "src")
        return _python("-m", "pytest", *SIDE_BY_SIDE, *rest, variables=environment.variables() | told)


@contextlib.contextmanager
def server_home(names: list[str], *options: str) -> Iterator[Path]:
    """The home of running servers: the developer's own if they all run, else a fresh one, removed at the end."""
    _sweep()
    if not names:
        yield HOME
        return
    if _run_servers("status", names, HOME, quiet=True) == 0:
        say("using the servers that run already")
        yield HOME
        return
    home = HOME / f"test-{os.getpid()}"
    try:
        if _run_servers("start", names, home, *options) != 0:
            raise SetupError(
                "a server did not start (see above). "
                "With ./dev test --without NAME it is left out, and its tests are reported as skipped"
            )
        yield home
    finally:
        if home.exists():
            _run_servers("stop", [*SERVER_NAMES], home, "--remove")
            shutil.rmtree(home, ignore_errors=True)


def _sweep() -> None:
    """Stop and remove what a run left behind that was itself killed."""
    for home in HOME.glob("test-*"):
        owner = int(home.name.removeprefix("test-"))
        try:
            os.kill(owner, 0)
        except ProcessLookupError:
            _run_servers("stop", [*SERVER_NAMES], home, "--remove")
            shutil.rmtree(home, ignore_errors=True)


def _run_servers(command: str, names: list[str], home: Path, *options: str, quiet: bool = False) -> int:
    arguments = [*SERVERS, command, "--only", ",".join(names), "--home", str(home), *options]
    return _python(*arguments, output=subprocess.DEVNULL if quiet else sys.stderr)


def servers(arguments: list[str]) -> int:
    """Start, stop or show the real servers."""
    _install_with_java()
    return _python(*SERVERS, *arguments)


def bench(arguments: list[str]) -> int:
    """Run one benchmark, on servers of its own unless some run already; its last line is one JSON object."""
    _install_with_java()
    signal.signal(signal.SIGTERM, _terminate)
    with server_home(bench_servers(arguments), "--profile", "bench") as home:
        if home == HOME and bench_servers(arguments):
            say("figures count only if these were started with --profile bench")
        told = {"TIDEBOOK_SERVERS": os.environ.get("TIDEBOOK_SERVERS") or str(home / "status.json")}
        return _python("-m", "tidebook.bench", *arguments, variables=environment.variables() | told)


def bench_servers(arguments: list[str]) -> list[str]:
    """What must run for this: nothing where servers are named, or only help is wanted."""
    words = {word for argument in arguments for word in argument.split("=")}
    if words & {"--book", "--address", "--help", "-h"} or os.environ.get("TIDEBOOK_SERVERS"):
        return []
    if "tags" in words and not words & {"cassandra", "both"}:  # its store is embedded unless --store says otherwise
        return []
    return [*BENCH_SERVERS.get(arguments[0] if arguments else "", ())]


def _later(name: str) -> int:
    print(f"dev: {name} comes later: it is not written yet", file=sys.stderr)
    return 2


def _refuse(reason: str) -> int:
    print(f"dev: {reason}", file=sys.stderr)
    return 2


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "up": up,
    "test": test,
    "setup": setup,
    "check": check,
    "bench": bench,
    "servers": servers,
    "faults": lambda _: _later("faults"),
    "docs": lambda _: _later("docs"),
    "build": lambda _: _later("build"),
}


def _install_with_java() -> None:
    with ThreadPoolExecutor(1) as pool:
        finding = pool.submit(java.ensure)
        environment.ensure("dev")
        os.environ["JAVA_HOME"] = str(finding.result())


def _python(*arguments: str, variables: dict[str, str] | None = None, output: int | TextIO | None = None) -> int:
    """Run .venv's Python to its end; an interrupt reaches it too, and is its to answer."""
    inside = variables or environment.variables()
    process = subprocess.Popen([str(PYTHON), *arguments], cwd=ROOT, env=inside, stdout=output)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.wait()
        raise
    except SystemExit:
        process.send_signal(signal.SIGINT)  # pytest answers it by cleaning up; at SIGTERM it would just end
        process.wait()
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


def _existing(*folders: str) -> list[str]:
    return [folder for folder in folders if (ROOT / folder).exists()]


def _terminate(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
