"""An archive of the classes that a local Spark loads at its start (AppCDS), which makes the JVM start faster.

An archive is valid for one version of Java and one class path, and is kept in the user's cache folder. The first long
run without one writes it, in another process of the lowest priority; later starts read it. The JVM ignores an archive
that does not match, so an archive can only make a start faster.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL

from tidebook.core.errors import InvalidInput
from tidebook.pipeline.jars import SPARK, cache_folder, find_java

CLASS_PATH = "spark.driver.extraClassPath"
JAVA_OPTIONS = "spark.driver.defaultJavaOptions"
#: A small initial heap and a collector without threads, because other processes need the machine too.
LOCAL_JAVA_OPTIONS = "-XX:+UseSerialGC -Xms128m"
#: How long a run must last before it writes the archive: a second process would slow down its start.
WRITE_AFTER_S = 60.0
WRITE_S_MAX = 600.0
NICE_MAX = 19
#: Suppress the JVM's messages about classes that it leaves out of the archive and loads from the jars.
_QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off"


def archive_file(class_path: str) -> Path | None:
    """Return the path of the archive for the installed Java and Spark and this class path; None without Java."""
    try:
        java = find_java().resolve()
        release = (java.parent.parent / "release").read_bytes()
    except (InvalidInput, OSError):
        return None
    spec = find_spec("pyspark")
    parts = (str(java), release.hex(), str(spec and spec.origin), class_path)
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return cache_folder() / "classes" / f"spark-{SPARK}-{digest}.jsa"


def read_options(class_path: str) -> str:
    """Return Java's options to read the archive; none if there is no archive yet."""
    archive = archive_file(class_path)
    if archive is None or not archive.exists():
        return ""
    return f'"-XX:SharedArchiveFile={archive}" {_QUIET}'


def write_later(class_path: str) -> None:
    """Write the archive in another process, if there is none yet and this process still runs after a while."""
    archive = archive_file(class_path)
    if archive is None or archive.exists():
        return

    def write() -> None:
        command = [sys.executable, "-m", "tidebook.pipeline.class_archive", class_path]
        popen = partial(subprocess.Popen, stdin=subprocess.PIPE, start_new_session=True)
        # Without an archive the next start is only slower. The writer ends with this process, which closes its input.
        with suppress(OSError, subprocess.TimeoutExpired), popen(command, stdout=DEVNULL, stderr=DEVNULL) as writer:
            writer.wait(WRITE_S_MAX)

    timer = threading.Timer(WRITE_AFTER_S, write)
    timer.daemon = True
    timer.start()


def write_archive(class_path: str) -> bool:
    """Start Spark, run a job with a Python worker, and archive the loaded classes; return whether this succeeded.

    Call it in a process that has not started Spark. Only one process writes at a time.
    """
    archive = archive_file(class_path)
    if archive is None or archive.exists():
        return False
    archive.parent.mkdir(parents=True, exist_ok=True)
    with archive.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        for abandoned in archive.parent.glob(f"{archive.stem}.*.writing"):  # left by processes that were killed
            abandoned.unlink()
        written = archive.with_suffix(f".{os.getpid()}.writing")  # unique: another JVM may write
        _run_spark(class_path, f'"-XX:ArchiveClassesAtExit={written}" {_QUIET}')
        if not written.exists():
            return False
        with written.open("rb") as file:
            os.fsync(file.fileno())
        written.rename(archive)
    return True


def _run_spark(class_path: str, options: str) -> None:
    from pyspark import SparkConf, SparkContext

    wanted = {
        "spark.app.name": "tidebook class archive",
        "spark.master": "local[1]",
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "1g",
        JAVA_OPTIONS: f"{LOCAL_JAVA_OPTIONS} {options}",
        CLASS_PATH: class_path,
    }
    context = SparkContext(conf=SparkConf().setAll(list(wanted.items())))
    context.setJobGroup("classes", "load the classes of a lease", interruptOnCancel=True)
    context.parallelize([0], 1).mapPartitions(list).collect()
    java = SparkContext._gateway.proc  # type: ignore[union-attr]
    context.stop()
    java.stdin.close()
    java.wait(WRITE_S_MAX)


def _exit_when_stdin_closes() -> None:
    """Terminate this process and its JVM when the process that started it has ended."""
    from pyspark import SparkContext

    while os.read(0, 1):  # not `sys.stdin`, whose lock this thread would hold when the process exits
        pass
    if SparkContext._gateway is not None:
        SparkContext._gateway.proc.kill()  # it would write its archive first
    os._exit(1)


def main() -> None:
    """Run the command `python -m tidebook.pipeline.class_archive CLASS_PATH`."""
    os.nice(NICE_MAX)
    threading.Thread(target=_exit_when_stdin_closes, daemon=True).start()
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    write_archive(sys.argv[1])


if __name__ == "__main__":
    main()
