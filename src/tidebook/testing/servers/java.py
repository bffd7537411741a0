"""The base class of Java servers: a class path, and an archive of preloaded classes (AppCDS) for faster starts."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from abc import abstractmethod
from functools import cache, cached_property
from pathlib import Path
from typing import ClassVar

from tidebook.testing.servers.ivy import cache_folder, find_java, locked
from tidebook.testing.servers.server import Server

#: Classes that the archive lacks are loaded from the jars; warnings about them are not useful.
_QUIET = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off")


class JavaServer(Server):
    """A server in its own Java process.

    In the profile `test` it starts with the class archive of an earlier start, which halves the start time. If this
    machine has no archive yet, a server is started and stopped once to write it.
    """

    version: ClassVar[str]
    #: The Java options for writing and reading the archive.
    archive_options: ClassVar[tuple[str, ...]] = ()
    #: The file to which this run writes the archive when it ends; None in an ordinary run.
    _training_to: Path | None = None

    @abstractmethod
    def jars(self) -> list[Path]:
        """Return the server's jars."""

    def remove(self) -> None:
        """Kill the server and delete its data, which a graceful stop would still write."""
        self.kill9()
        super().remove()

    @cached_property
    def class_path(self) -> str:
        return os.pathsep.join(str(jar) for jar in self.jars())

    def read_classes(self) -> list[str]:
        """Return Java's options to read the archive; empty in the run that writes it."""
        if self.profile != "test" or self._training_to is not None:
            return []
        archive = self._archive()
        with locked(archive.with_suffix(".lock")):
            if not archive.exists():
                self._train(archive)
        return [*self.archive_options, f"-XX:SharedArchiveFile={archive}", "-Xshare:auto", *_QUIET]

    def write_classes(self) -> list[str]:
        """Return Java's options to write the archive; empty in any other run."""
        if self._training_to is None:
            return []
        return [*self.archive_options, f"-XX:ArchiveClassesAtExit={self._training_to}", *_QUIET]

    def _train(self, archive: Path) -> None:
        with tempfile.TemporaryDirectory(dir=archive.parent, prefix=".training-") as folder:
            trained = type(self)(Path(folder) / "server")
            trained._training_to = Path(folder) / "classes.jsa"
            with trained:
                pass
            if trained._training_to.exists():
                trained._training_to.rename(archive)

    def _archive(self) -> Path:
        """Return the archive file, which is valid only for one Java version and one class path."""
        digest = hashlib.sha256(_version_of(find_java()) + self.class_path.encode()).hexdigest()[:16]
        return cache_folder() / "classes" / f"{self.name}-{self.version}-{digest}.jsa"


@cache
def _version_of(java: Path) -> bytes:
    return subprocess.run([str(java), "-version"], capture_output=True, check=True).stderr
