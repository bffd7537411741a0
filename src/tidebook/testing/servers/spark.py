"""Run the daemons of a standalone Spark cluster: a master, and workers with one core each."""

from __future__ import annotations

import os
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from tidebook.testing.servers.errors import ServerError
from tidebook.testing.servers.ivy import find_java
from tidebook.testing.servers.server import Profile, Server

PROBE_S_MAX = 2
DAEMON_HEAP = "-Xmx256m"
#: The packages that Spark's own launcher opens to reflection on Java 17.
OPENS = (
    "java.base/java.lang",
    "java.base/java.lang.invoke",
    "java.base/java.io",
    "java.base/java.net",
    "java.base/java.nio",
    "java.base/java.util",
    "java.base/java.util.concurrent",
    "java.base/sun.nio.ch",
)


class SparkMasterNode(Server):
    """The master of a standalone cluster."""

    name: ClassVar[str] = "spark-master"

    @property
    def url(self) -> str:
        return f"spark://{self.address}"

    def prepare(self) -> None:
        _spark_jars()

    def command(self) -> list[str]:
        port = str(self.ports["client"])
        return _daemon("org.apache.spark.deploy.master.Master", "--host", self.host, "--port", port)

    def probe(self) -> None:
        socket.create_connection((self.host, self.ports["client"]), timeout=PROBE_S_MAX).close()


class SparkWorkerNode(Server):
    """A worker of a standalone cluster, with one core and 1 GiB for executors."""

    name: ClassVar[str] = "spark-worker"

    def __init__(self, folder: Path, master: SparkMasterNode, *, profile: Profile = "test") -> None:
        super().__init__(folder, profile=profile)
        self._master = master

    @property
    def url(self) -> str:
        return self._master.url

    def prepare(self) -> None:
        (self.folder / "work").mkdir(exist_ok=True)

    def command(self) -> list[str]:
        options = ["--host", self.host, "--port", str(self.ports["client"]), "--cores", "1", "--memory", "1g"]
        options += ["--work-dir", str(self.folder / "work"), self._master.url]
        return _daemon("org.apache.spark.deploy.worker.Worker", *options)

    def probe(self) -> None:
        socket.create_connection((self.host, self.ports["client"]), timeout=PROBE_S_MAX).close()


def _daemon(main: str, *arguments: str) -> list[str]:
    opens = [f"--add-opens={package}=ALL-UNNAMED" for package in OPENS]
    home = _spark_jars().parent
    variables = {"SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    environment = ["/usr/bin/env", *(f"{name}={value}" for name, value in variables.items())]
    java = [str(find_java()), DAEMON_HEAP, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", *opens]
    return [*environment, *java, "-cp", f"{_spark_jars()}{os.sep}*", main, *arguments, "--webui-port", "0"]


def _spark_jars() -> Path:
    """Return the folder of PySpark's jars; raise `ServerError` if PySpark is not installed."""
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise ServerError("Spark needs PySpark: install the extra 'spark'")
    return Path(spec.origin).parent / "jars"
