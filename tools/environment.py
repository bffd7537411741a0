"""The virtual environment: created from hash-pinned requirement files, and updated only when they change."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.pip_progress import count_packages, run_pip

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
#: The purpose of the packages of each requirement file, and the approximate size of the download.
CONTENTS = {
    "base": "packages for an embedded book and its server (about 16 MB)",
    "all": "all extras, with Spark (hundreds of MB)",
    "dev": "all extras, with Spark, and the development tools (hundreds of MB, minutes)",
}


class SetupError(Exception):
    """A missing prerequisite of this machine; the message says how to install it."""


def say(text: str) -> None:
    """Print progress to standard error, because standard output is reserved for the command's result."""
    print(f"dev: {text}", file=sys.stderr, flush=True)


def refuse(reason: str) -> int:
    """Print why the arguments of a command are not valid; return the exit code."""
    print(f"dev: {reason}", file=sys.stderr)
    return 2


def ensure(requirements: str) -> None:
    """Install a requirement file ("base", "all" or "dev") and Tidebook itself, editable, into .venv."""
    with _one_at_a_time():
        if not _was_made_here():
            _make()
        if not has(requirements):
            # The packages of base are wheels. Others are built, so the build tools must be installed first.
            if requirements != "base":
                _install("build", "the build tools")
            _install(requirements, CONTENTS[requirements], beside="build" if requirements == "base" else None)
            _stamp(requirements, _requirements_digest(requirements))
        # If .venv is a link, it is shared with other work trees: keep the installed Tidebook.
        shared = VENV.is_symlink() and (VENV / "stamps" / "tidebook").exists()
        if not shared and not _stamped("tidebook", _project_digest()):
            say("installing Tidebook itself, editable")
            _pip("--quiet", "--no-deps", "--no-build-isolation", "--editable", ".")
            _stamp("tidebook", _project_digest())
        if _stamped("dev", _requirements_digest("dev")):
            (VENV / "READY").touch()


def has(requirements: str) -> bool:
    """Return whether the packages of a requirement file are installed in .venv."""
    # dev includes all, and all includes base: an installed larger set satisfies a smaller one.
    larger = {"base": ["base", "all", "dev"], "all": ["all", "dev"], "dev": ["dev"]}[requirements]
    return _was_made_here() and any(_stamped(name, _requirements_digest(name)) for name in larger)


def variables() -> dict[str, str]:
    """Return the environment variables for processes inside .venv."""
    shared = {"PYTHONPATH": str(ROOT / "src")} if VENV.is_symlink() else {}
    return {
        **os.environ,
        **shared,
        "PYTHONDONTWRITEBYTECODE": "",  # otherwise each of the tests' many processes would compile all modules
        "VIRTUAL_ENV": str(VENV),
        "PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "PYSPARK_PYTHON": str(PYTHON),
        "PYSPARK_DRIVER_PYTHON": str(PYTHON),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    handle = os.open(ROOT / "requirements", os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _was_made_here() -> bool:
    """Return True if .venv works and was created at this path, which its scripts contain."""
    return PYTHON.exists() and _stamped("folder", str(VENV.resolve()))


def _make() -> None:
    say("making .venv")
    if VENV.is_symlink():
        if PYTHON.exists():
            raise SetupError(".venv is a link to an environment that ./dev did not make: remove the link and try again")
    else:
        shutil.rmtree(VENV, ignore_errors=True)
    try:
        import ensurepip  # noqa: F401
    except ModuleNotFoundError:
        _install_ensurepip()
    # Its output is only shown if it fails: at Ctrl-C it prints a traceback.
    command = [sys.executable, "-m", "venv", str(VENV.resolve())]
    made = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if made.returncode != 0:
        sys.stderr.write(made.stdout)
        raise SetupError(f"{sys.executable} -m venv failed; see its message above")
    _stamp("folder", str(VENV.resolve()))


def _install_ensurepip() -> None:
    package = f"python3.{sys.version_info.minor}-venv"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SetupError(f"this Python has no ensurepip; install the package {package} (Debian, Ubuntu) and try again")
    apt_install(package)


def apt_install(package: str) -> None:
    """Install a Debian package, as root."""
    say(f"installing {package} with apt-get")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update", "-q"], env=quiet, stdout=sys.stderr, check=False)
    done = subprocess.run(
        ["apt-get", "install", "-q", "-y", "--no-install-recommends", package],
        env=quiet,
        stdout=sys.stderr,
        check=False,
    )
    if done.returncode != 0:
        raise SetupError(f"apt-get could not install {package}; see its message above")


def _install(name: str, contents: str, beside: str | None = None) -> None:
    """Install a requirement file, or two in one run; pip resolves no dependency, because the files list all."""
    files = [f"requirements/{each}.txt" for each in (name, beside) if each is not None]
    packages = sum(count_packages((ROOT / file).read_text()) for file in files)
    say(f"downloading and installing {' and '.join(files)} into .venv: {contents}")
    # Without build isolation, pip uses the pinned build tools for source packages, and downloads no others. Modules are
    # compiled at their first import, because most are never imported.
    options = ("--require-hashes", "--no-deps", "--no-build-isolation", "--no-compile", "--progress-bar", "off")
    _pip(*options, *(part for file in files for part in ("--requirement", file)), packages=packages)


def _pip(*arguments: str, packages: int = 0) -> None:
    """Run `pip install`, and show the progress if it installs `packages`."""
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", *arguments]
    if packages:
        code = run_pip(command, ROOT, packages)
    else:
        code = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False).returncode
    if code != 0:
        raise SetupError("pip install failed; see its message above")


def _requirements_digest(name: str) -> str:
    digest = hashlib.sha256()
    for file in ("build", name):
        digest.update((ROOT / "requirements" / f"{file}.txt").read_bytes())
    return digest.hexdigest()


def _project_digest() -> str:
    return hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()


def _stamped(name: str, value: str) -> bool:
    stamp = VENV / "stamps" / name
    return stamp.exists() and stamp.read_text() == value


def _stamp(name: str, value: str) -> None:
    stamp = VENV / "stamps" / name
    stamp.parent.mkdir(exist_ok=True)
    stamp.write_text(value)
