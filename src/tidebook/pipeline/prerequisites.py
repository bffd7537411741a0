"""Check that PySpark and a recent Java are installed before a job starts Spark."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from tidebook.core.errors import InvalidInput
from tidebook.pipeline.ivy import find_java

JAVA_MIN = 17
_VERSION = re.compile(r'^JAVA_VERSION="(?:1\.)?(\d+)', re.M)


def missing_for_spark() -> str | None:
    """Return why Spark cannot run on this machine and how to fix it, or None if it can."""
    if find_spec("pyspark") is None:
        return f"PySpark is not installed: pip install 'tidebook[spark]' (it needs Java {JAVA_MIN} or newer)"
    try:
        java = find_java()
    except InvalidInput as error:
        return str(error)
    version = java_version(java)
    if version is not None and version < JAVA_MIN:
        return f"Spark needs Java {JAVA_MIN} or newer, and {java} is {version}: set JAVA_HOME to a newer one"
    return None


def java_version(java: Path) -> int | None:
    """Return the major version of a java from its `release` file, or None if there is no such file."""
    try:
        release = (java.resolve().parent.parent / "release").read_text(errors="replace")
    except OSError:
        return None
    found = _VERSION.search(release)
    return None if found is None else int(found[1])
