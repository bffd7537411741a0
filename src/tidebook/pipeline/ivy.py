"""Resolve Maven artifacts with the Ivy that ships inside PySpark and its default repositories."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import quoteattr

from tidebook.core.errors import InvalidInput, Unavailable

RESOLVE_S_MAX = 900
LOG_CHARS_MAX = 4000


@dataclass(frozen=True)
class Artifact:
    """One Maven module at one version, by default with its runtime dependencies."""

    organisation: str
    name: str
    revision: str
    transitive: bool = True

    def as_ivy(self) -> str:
        """Return the dependency element for an ivy.xml."""
        configuration = "default->runtime(*),master(*)" if self.transitive else "default->master(*)"
        attributes = {
            "org": self.organisation,
            "name": self.name,
            "rev": self.revision,
            "transitive": str(self.transitive).lower(),
            "conf": configuration,
        }
        return "<dependency " + " ".join(f"{name}={quoteattr(value)}" for name, value in attributes.items()) + "/>"


def cache_folder() -> Path:
    """Return the user's cache folder for downloads."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidebook"


def resolve(name: str, artifacts: Sequence[Artifact]) -> list[Path]:
    """Return the jars of a set of artifacts; download them if the cache has no set of that name."""
    folder = cache_folder() / "jars" / name
    if not folder.exists():
        with locked(folder.with_name(f"{name}.lock")):
            if not folder.exists():
                _download(folder, artifacts)
    return sorted(folder.glob("*.jar"))


def find_java() -> Path:
    """Return the java executable of JAVA_HOME, else the one on PATH; raise `InvalidInput` if there is none."""
    if home := os.environ.get("JAVA_HOME"):
        java = Path(home) / "bin" / "java"
        if os.access(java, os.X_OK):
            return java
        raise InvalidInput(f"Java 17 or newer is needed, and JAVA_HOME has none: there is no {java}")
    if found := shutil.which("java"):
        return Path(found)
    raise InvalidInput("Java 17 or newer is needed: set JAVA_HOME, or put java on PATH")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file lock, so that two processes do not fill the same cache folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _download(folder: Path, artifacts: Sequence[Artifact]) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".resolving-") as temporary:
        staging = Path(temporary)
        dependencies = "\n".join(artifact.as_ivy() for artifact in artifacts)
        (staging / "ivy.xml").write_text(
            '<ivy-module version="2.0"><info organisation="tidebook" module="jars"/>'
            f'<configurations><conf name="default"/></configurations>'
            f"<dependencies>{dependencies}</dependencies></ivy-module>"
        )
        command = [
            str(find_java()),
            f"-Divy.default.ivy.user.dir={staging / 'user'}",
            *("-jar", str(_ivy_jar())),
            *("-ivy", str(staging / "ivy.xml")),
            *("-cache", str(staging / "cache")),
            *("-types", "jar", "bundle"),
            *("-retrieve", f"{staging}/lib/[artifact]-[revision](-[classifier]).[ext]"),
        ]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=RESOLVE_S_MAX, check=False
        )
        if done.returncode != 0 or not any((staging / "lib").glob("*.jar")):
            problems = [line for line in done.stdout.splitlines() if not line.startswith(".")]
            raise Unavailable(f"could not resolve {folder.name}:\n" + "\n".join(problems)[-LOG_CHARS_MAX:])
        (staging / "lib").rename(folder)


def _ivy_jar() -> Path:
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise InvalidInput("PySpark brings the resolver of Java artifacts: pip install 'tidebook[spark]'")
    found = sorted((Path(spec.origin).parent / "jars").glob("ivy-*.jar"))
    if not found:
        raise InvalidInput("this PySpark brings no Ivy")
    return found[-1]
