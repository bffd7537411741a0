"""Find Java for Spark, and download the jars that PySpark lacks with the Ivy (a dependency resolver) that it ships."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from tidebook.core.errors import InvalidInput, Unavailable

SPARK = "4.2.0"
DELTA = "4.4.0"
JAVA_MIN = 17
RESOLVE_S_MAX = 900
LOG_CHARS_MAX = 4000
_JAVA_VERSION = re.compile(r'^JAVA_VERSION="(?:1\.)?(\d+)', re.M)


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
        return (
            f'<dependency org="{self.organisation}" name="{self.name}" rev="{self.revision}" '
            f'transitive="{str(self.transitive).lower()}" conf="{configuration.replace(">", "&gt;")}"/>'
        )


def kafka_source_jars() -> list[Path]:
    """Return the jars of Spark's Kafka source and sink, for the setting spark.jars.

    The newest published token provider is 4.0.0, which works with this version of Spark. Transitive dependencies are
    left out, because the Kafka client must have the version for which the source was built.
    """
    return resolve(
        f"spark-kafka-{SPARK}",
        [
            Artifact("org.apache.spark", "spark-sql-kafka-0-10_2.13", SPARK, transitive=False),
            Artifact("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.0.0", transitive=False),
            Artifact("org.apache.kafka", "kafka-clients", "3.9.2", transitive=False),
            Artifact("org.apache.commons", "commons-pool2", "2.13.1", transitive=False),
            Artifact("org.scala-lang.modules", "scala-parallel-collections_2.13", "1.2.0", transitive=False),
        ],
    )


def delta_jars() -> list[Path]:
    """Return the jars of Delta Lake, for the setting spark.jars; Spark ships its other dependencies."""
    modules = ("delta-spark_4.2_2.13", "delta-storage", "delta-kernel-api", "delta-kernel-defaults")
    return resolve(f"delta-{DELTA}", [Artifact("io.delta", module, DELTA, transitive=False) for module in modules])


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


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file lock, so that only one process at a time fills a cache folder."""
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
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise InvalidInput("the Java artifacts are resolved by PySpark's Ivy: pip install 'tidebook[spark]'")
    found = sorted((Path(spec.origin).parent / "jars").glob("ivy-*.jar"))
    if not found:
        raise InvalidInput("this installation of PySpark contains no Ivy")
    return found[-1]


def find_java() -> Path:
    """Return the java executable of JAVA_HOME, else the one on PATH; raise `InvalidInput` if there is none."""
    if home := os.environ.get("JAVA_HOME"):
        java = Path(home) / "bin" / "java"
        if os.access(java, os.X_OK):
            return java
        raise InvalidInput(f"Java {JAVA_MIN} or newer is needed, but JAVA_HOME has no executable {java}")
    if found := shutil.which("java"):
        return Path(found)
    raise InvalidInput(f"Java {JAVA_MIN} or newer is needed: set JAVA_HOME, or put java on PATH")


def missing_for_spark() -> str | None:
    """Return why Spark cannot run on this machine and how to fix it, or None if it can."""
    if find_spec("pyspark") is None:
        return f"PySpark is not installed: pip install 'tidebook[spark]' (it needs Java {JAVA_MIN} or newer)"
    try:
        java = find_java()
    except InvalidInput as error:
        return str(error)
    try:
        release = (java.resolve().parent.parent / "release").read_text(errors="replace")
    except OSError:
        return None  # the version is unknown until Spark starts
    version = _JAVA_VERSION.search(release)
    if version is not None and int(version[1]) < JAVA_MIN:
        return f"Spark needs Java {JAVA_MIN} or newer, and {java} is {version[1]}: set JAVA_HOME to a newer one"
    return None
