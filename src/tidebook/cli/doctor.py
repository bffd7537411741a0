"""`tidebook doctor`: check the installation, the servers and files of a book, and that its log and store match."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec

import apsw
import typer

import tidebook
from tidebook.cli import output
from tidebook.cli.options import BookOption, book_settings, embedded_files, is_address, open_book
from tidebook.cli.topics import checked_description
from tidebook.core.errors import InvalidInput, NotFound, TidebookError
from tidebook.pipeline.jars import find_java, missing_for_spark
from tidebook.runtime.clock import RandomIds, SystemClock
from tidebook.runtime.metrics import Metrics
from tidebook.sqlite.checksums import find_file_damage
from tidebook.wiring.book import Book
from tidebook.wiring.server_checks import check_remote, check_servers, check_topic
from tidebook.wiring.settings import Settings

EXTRAS = {
    "kafka": "confluent_kafka",
    "cassandra": "acsylla",
    "postgres": "psycopg",
    "outbox": "sqlalchemy",
    "mysql": "pymysql",
    "spark": "pyspark",
    "projections": "sqlalchemy",
    "pydantic": "pydantic",
    "remote": "httpx",
    "server": "starlette",
}
#: Less free space than this on the disk of a folder is a failed check.
FREE_MB_MIN = 500


class Findings:
    """Prints each finding and collects the names of failed checks."""

    def __init__(self) -> None:
        self.bad: list[str] = []

    def add(self, check: str, ok: bool | None, detail: str) -> None:
        """Print a finding; `ok` is None if it is only information."""
        if ok is False:
            self.bad.append(check)
        mark = {True: "ok  ", False: "BAD ", None: "    "}[ok]
        output.emit({"check": check, "ok": ok, "detail": detail}, f"{mark}{check}: {detail}")


async def doctor(book: BookOption) -> None:
    """Check this installation and a book.

    Exit with code 1 if a check fails. Read every page of the book's files, and create nothing.
    """
    findings = Findings()
    _check_installation(findings)
    if is_address(book):
        await _check_server(findings, book)
        if findings.bad:
            raise typer.Exit(1)
        return
    try:
        settings = book_settings(book)
    except NotFound as error:
        if book is not None:
            raise
        findings.add("book", None, str(error))  # a new installation without a book is not an error
    except InvalidInput as error:
        findings.add("settings", False, str(error))
    else:
        _check_settings(findings, settings)
        _check_folder(findings, settings)
        _check_files(findings, settings)
        async for found in check_servers(settings):
            findings.add(found.check, found.ok, found.detail)
        await _check_topics(findings, settings)
    if findings.bad:
        raise typer.Exit(1)


async def _check_server(findings: Findings, book: str | None) -> None:
    """Check the parts of a book that are visible through its server."""
    try:
        async with open_book(book) as opened:
            from tidebook.wiring.remote_book import RemoteBook

            assert isinstance(opened, RemoteBook)
            for found in await check_remote(opened, tidebook.__version__):
                findings.add(found.check, found.ok, found.detail)
            topics = await opened.topics()  # also checks the token
            findings.add("book", True, f"{book}, {len(topics):,} topics")
    except TidebookError as error:
        findings.add("server", False, str(error))
    findings.add("files", None, "not checked here: run 'tidebook doctor' where the server's book is")


def _check_installation(findings: Findings) -> None:
    findings.add("python", sys.version_info >= (3, 11), platform.python_version())
    sqlite = apsw.sqlitelibversion()
    known = tuple(int(part) for part in sqlite.split(".")) >= (3, 51, 3)
    findings.add("sqlite", known, sqlite if known else f"{sqlite} can damage files: pip install --upgrade apsw")
    findings.add("java", *_describe_java())
    for name, module in EXTRAS.items():
        installed = find_spec(module) is not None
        detail = "installed" if installed else f"not installed: pip install 'tidebook[{name}]'"
        findings.add(f"extra {name}", None, detail)


def _describe_java() -> tuple[bool | None, str]:
    """Return the Java that Spark would use; the check fails only if Spark is installed and cannot use it."""
    try:
        java = find_java()
    except InvalidInput as error:
        return None, f"{error}; only Spark needs it"
    if find_spec("pyspark") is not None and (missing := missing_for_spark()) is not None:
        return False, missing
    return None, str(java)


def _check_settings(findings: Findings, settings: Settings) -> None:
    """Check every section, because other commands read only those of the parts that they use."""
    from tidebook.journal.settings import JournalSettings
    from tidebook.outbox.settings import OutboxSettings
    from tidebook.pipeline.session import pipeline_settings
    from tidebook.server.masking import Masks
    from tidebook.server.settings import ServerSettings
    from tidebook.tags.settings import TagSettings
    from tidebook.wal.settings import WalSettings
    from tidebook.wiring.queue import make_queues

    checks: dict[str, Callable[[], object]] = {
        "journal": lambda: settings.options("journal", JournalSettings),
        "tags": lambda: settings.options("tags", TagSettings),
        "wal": lambda: settings.options("wal", WalSettings),
        "outbox": lambda: settings.options("outbox", OutboxSettings),
        "server": lambda: settings.options("server", ServerSettings),
        "mask": lambda: Masks(settings.section("mask").options),
        "pipeline": lambda: pipeline_settings(settings),
        "queue": lambda: make_queues(settings, clock=SystemClock(), ids=RandomIds(), metrics=Metrics()),
    }
    for name, check in checks.items():
        try:
            check()
        except TidebookError as error:
            findings.add(f"settings [{name}]", False, str(error))


def _check_folder(findings: Findings, settings: Settings) -> None:
    """Check that this user may write the book's folder, and that its disk has space."""
    folder = settings.folder.expanduser()
    if not folder.exists():
        return
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        findings.add("folder", False, f"{folder} cannot be written by this user: chown or chmod it")
        return
    free_mb = shutil.disk_usage(folder).free // 1_000_000
    detail = f"{free_mb:,} MB free on the disk"
    remedy = "" if free_mb >= FREE_MB_MIN else ": free some space, or appends will fail"
    findings.add("folder", free_mb >= FREE_MB_MIN, detail + remedy)


def _check_files(findings: Findings, settings: Settings) -> None:
    """Check each file separately, so that one that cannot be opened does not hide damage in another."""
    for file in embedded_files(settings):
        path = settings.folder.expanduser() / file
        if not path.exists():
            continue
        beside = [each for each in path.parent.glob(f"{file}*") if not os.access(each, os.R_OK | os.W_OK)]
        if beside:  # a command that another user ran created them
            names = ", ".join(sorted(each.name for each in beside))
            findings.add(f"file {file}", False, f"{names} cannot be read and written by this user: chown or chmod it")
            continue
        damage = find_file_damage(path)
        detail = f"{damage[0]} ({len(damage)} findings): restore a copy of it" if damage else "no damage found"
        findings.add(f"file {file}", not damage, " ".join(detail.split()))


async def _check_topics(findings: Findings, settings: Settings) -> None:
    try:
        async with Book(settings) as each:
            findings.add("book", True, str(settings.folder.resolve()))
            for topic in await each.topics():
                try:
                    status = await checked_description(each, topic)
                    detail = f"epoch {status.epoch}, {status.records:,} records, {status.lag:,} not replicated yet"
                    findings.add(f"topic {topic}", True, detail)
                    for found in await check_topic(each, status, now_ms=time.time_ns() // 1_000_000):
                        findings.add(found.check, found.ok, found.detail)
                except TidebookError as error:
                    findings.add(f"topic {topic}", False, str(error))
    except TidebookError as error:
        findings.add("book", False, str(error))
