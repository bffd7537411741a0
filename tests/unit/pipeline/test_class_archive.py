"""The archive of Spark's classes: its key of Java and class path, and when it is read and written."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from tidebook.pipeline import class_archive, session
from tidebook.pipeline.class_archive import (
    CLASS_PATH,
    JAVA_OPTIONS,
    LOCAL_JAVA_OPTIONS,
    archive_file,
    read_options,
    write_archive,
    write_later,
)
from tidebook.pipeline.session import CLUSTER, PipelineSettings


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a cache folder and a Java of this test only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _install_java(tmp_path / "java", "17.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "java"))
    return tmp_path


def _install_java(home: Path, version: str) -> None:
    (home / "bin").mkdir(parents=True, exist_ok=True)
    (home / "bin" / "java").write_text("#!/bin/sh\nexit 1\n")
    (home / "bin" / "java").chmod(0o755)
    (home / "release").write_text(f'JAVA_VERSION="{version}"\n')


def _spark_settings(settings: PipelineSettings, more: dict[str, str] | None = None) -> dict[str, str]:
    return session._spark_settings(settings, more)


def test_an_archive_is_of_one_java_and_one_class_path(cache: Path) -> None:
    first = archive_file("")
    assert first is not None
    assert first == archive_file("") != archive_file("a.jar")
    _install_java(cache / "java", "17.0.2")
    assert archive_file("") != first


def test_a_local_spark_reads_the_archive_of_its_class_path_if_it_exists(cache: Path) -> None:
    assert _spark_settings(PipelineSettings())[JAVA_OPTIONS] == LOCAL_JAVA_OPTIONS
    archive = archive_file("a.jar")
    assert archive is not None
    archive.parent.mkdir(parents=True)
    archive.touch()
    wanted = _spark_settings(PipelineSettings(), {CLASS_PATH: "a.jar"})
    assert wanted[JAVA_OPTIONS] == f"{LOCAL_JAVA_OPTIONS} {read_options('a.jar')}"
    assert f"-XX:SharedArchiveFile={archive}" in wanted[JAVA_OPTIONS]
    assert _spark_settings(PipelineSettings())[JAVA_OPTIONS] == LOCAL_JAVA_OPTIONS


def test_a_cluster_and_options_of_the_user_are_not_changed() -> None:
    archive = archive_file("")
    assert archive is not None
    archive.parent.mkdir(parents=True)
    archive.touch()
    cluster = _spark_settings(PipelineSettings(master="spark://host:7077"))
    assert JAVA_OPTIONS not in cluster
    assert cluster.items() >= CLUSTER.items()
    own = _spark_settings(PipelineSettings(spark={JAVA_OPTIONS: "-Xms1g"}))
    assert own[JAVA_OPTIONS] == "-Xms1g"
    assert not own.keys() & CLUSTER.keys()


def test_no_archive_is_written_if_it_exists_or_another_process_is_writing_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import fcntl

    monkeypatch.setattr(class_archive, "_run_spark", lambda *_: pytest.fail("it must not start Spark"))
    monkeypatch.setattr(threading, "Timer", lambda *_: pytest.fail("it must not start a writer"))
    archive = archive_file("")
    assert archive is not None
    archive.parent.mkdir(parents=True)
    with archive.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not write_archive("")
    archive.touch()
    assert not write_archive("")
    write_later("")


def test_an_archive_is_visible_only_when_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    archive = archive_file("")
    assert archive is not None
    archive.parent.mkdir(parents=True)
    archive.with_suffix(".1.writing").write_text("by a process that was killed")

    def run_spark(class_path: str, options: str) -> None:
        assert [file.suffix for file in archive.parent.iterdir()] == [".lock"]
        (written,) = re.findall(r"ArchiveClassesAtExit=([^\"]+)", options)
        Path(written).write_text("classes")

    monkeypatch.setattr(class_archive, "_run_spark", lambda class_path, options: None)
    assert not write_archive("")  # Java has written no archive
    assert not archive.exists()
    monkeypatch.setattr(class_archive, "_run_spark", run_spark)
    assert write_archive("")
    assert archive.read_text() == "classes"
    assert sorted(file.suffix for file in archive.parent.iterdir()) == [".jsa", ".lock"]


def test_a_writer_ends_with_the_process_that_started_it(cache: Path) -> None:
    """Its Java waits for its standard input, which stays open while the writer runs."""
    (cache / "java" / "bin" / "java").write_text(f"#!/bin/sh\ntouch {cache / 'started'}\nexec cat\n")
    command = [sys.executable, "-m", "tidebook.pipeline.class_archive", ""]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as writer:
        while not (cache / "started").exists():
            assert writer.poll() is None
            threading.Event().wait(0.05)
        assert writer.stdin is not None
        writer.stdin.close()
        assert writer.wait(60) == 1
