"""Download Maven artifacts and find Java with the pipeline's functions, whose errors become `ServerError`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tidebook.core.errors import TidebookError
from tidebook.pipeline import jars
from tidebook.pipeline.jars import Artifact, cache_folder, locked
from tidebook.testing.servers.errors import ServerError

__all__ = ["Artifact", "cache_folder", "find_java", "locked", "resolve"]


def resolve(name: str, artifacts: Sequence[Artifact]) -> list[Path]:
    """Return the jars of a set of artifacts; download them if the cache does not have the set."""
    try:
        return jars.resolve(name, artifacts)
    except TidebookError as error:
        raise ServerError(str(error)) from error


def find_java() -> Path:
    """Return the java executable for servers: from JAVA_HOME, otherwise from PATH."""
    try:
        return jars.find_java()
    except TidebookError as error:
        raise ServerError(str(error)) from error
