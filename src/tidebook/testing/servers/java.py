"""What servers in Java have in common: a class path, and an archive of the classes that a start loads (AppCDS)."""

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

#: What an archive lacks is loaded from the jars: nothing that its users need to read of.
_QUIET = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off")


class JavaServer(Server):
    """A server in a Java of its own. In the profile `test` it begins with the classes of an earlier start, in half
    the time; where there was none on this machine, one is started and stopped for that.
    """

    version: ClassVar[str]
    #: What Java must be told so that such an archive may be written and read.
    archive_options: ClassVar[tuple[str, ...]] = ()
    #: Where this run writes its archive when it ends; None where it is an ordinary one.
    _training_to: Path | None = None

    @abstractmethod
    def jars(self) -> list[Path]:
        """What the server is made of."""

    def remove(self) -> None:
        """Kill the server and delete all it kept: what it would still write in peace goes too."""
        self.kill9()
        super().remove()

    @cached_property
    def class_path(self) -> str:
        return os.pathsep.join(str(jar) for jar in self.jars())

    def read_classes(self) -> list[str]:
        """Java's options for the archive; none in a run that is to write it."""
        if self.profile != "test" or self._training_to is not None:
            return []
        archive = self._archive()
        with locked(archive.with_suffix(".lock")):
            if not archive.exists():
                self._train(archive)
        return [*self.archive_options, f"-XX:SharedArchiveFile={archive}", "-Xshare:auto", *_QUIET]

    def write_classes(self) -> list[str]:
        """Java's options in a run that writes the archive; none in any other."""
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
        """An archive serves one Java and one class path only."""
        digest = hashlib.sha256(_version_of(find_java()) + self.class_path.encode()).hexdigest()[:16]
        return cache_folder() / "classes" / f"{self.name}-{self.version}-{digest}.jsa"


@cache
def _version_of(java: Path) -> bytes:
    return subprocess.run([str(java), "-version"], capture_output=True, check=True).stderr
