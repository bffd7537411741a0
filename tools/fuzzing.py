"""`./dev fuzz`: coverage-guided fuzzing, by atheris, of the parsers of untrusted bytes."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from tools import environment
from tools.environment import PYTHON, ROOT, say
from tools.tool_environment import ensure_tools

#: The inputs in the repository, and those that a run finds.
KEPT = ROOT / "tests" / "fuzz" / "corpus"
FOUND = ROOT / "build" / "fuzz"
TARGETS = tuple(sorted(each.name for each in KEPT.iterdir())) if KEPT.exists() else ()


def fuzz(arguments: list[str]) -> int:
    """Fuzz one target, or each in turn; print the command that repeats an input that fails."""
    parser = argparse.ArgumentParser(prog="./dev fuzz", description=fuzz.__doc__)
    parser.add_argument("target", nargs="?", choices=TARGETS, help="the parser to fuzz; all of them if none is named")
    parser.add_argument("--seconds", type=int, default=60, help="seconds for each target (60)")
    parser.add_argument("--input", type=Path, help="run the target on this file alone, for example one that failed")
    options = parser.parse_args(arguments)
    if options.input is not None and options.target is None:
        parser.error("--input needs a target")
    environment.ensure("dev")
    if options.input is not None:
        return _run_input(options.target, options.input)
    tools = ensure_tools("fuzz", "atheris (about 35 MB)", python=PYTHON)
    packages = next((tools / "lib").glob("python*/site-packages"))
    failed = [name for name in ([options.target] if options.target else TARGETS) if _fuzz(name, options, packages) != 0]
    say(f"failed: {', '.join(failed)}" if failed else "no input failed")
    return 1 if failed else 0


def _fuzz(name: str, options: argparse.Namespace, packages: Path) -> int:
    say(f"fuzzing {name} for {options.seconds} s")
    found = FOUND / name
    found.mkdir(parents=True, exist_ok=True)
    before = set(found.glob("failed-*"))
    variables = environment.variables()
    paths = [str(ROOT / "src"), str(ROOT), str(packages)]
    variables["PYTHONPATH"] = ":".join(paths)
    command = [str(PYTHON), "-m", "tests.fuzz", name, str(options.seconds), str(found), str(KEPT / name)]
    code = subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode
    for file in sorted(set(found.glob("failed-*")) - before):
        say(f"{name} fails: ./dev fuzz {name} --input {file.relative_to(ROOT)}")
    return code


def _run_input(name: str, file: Path) -> int:
    code = "import sys; from tests.fuzz.targets import TARGETS; TARGETS[sys.argv[1]](open(sys.argv[2], 'rb').read())"
    variables = environment.variables() | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [str(PYTHON), "-c", code, name, str(file.resolve())]
    return subprocess.run(command, cwd=ROOT, env=variables, stdout=sys.stderr, check=False).returncode
