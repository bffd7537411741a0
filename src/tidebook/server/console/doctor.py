"""The doctor: checks of the installation, of the parts of the book, and of its topics and files."""

from __future__ import annotations

import asyncio
import platform
import shutil
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import apsw
import msgspec

import tidebook
from tidebook.api.access import Role
from tidebook.api.errors import PermissionDenied
from tidebook.server.console.findings import findings_of
from tidebook.server.console.health import part_health
from tidebook.server.console.page import Page
from tidebook.server.console.routes import DOCTOR_PAGE
from tidebook.server.console.view import View
from tidebook.sqlite.checksums import find_file_damage

TOPICS_MAX: Final = 100
PROBLEMS_MAX: Final = 10
EXTRAS: Final = {
    "kafka": "confluent_kafka",
    "cassandra": "acsylla",
    "postgres": "psycopg",
    "outbox": "sqlalchemy",
    "spark": "pyspark",
}


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One check; `ok` is None if it is only information."""

    name: str
    ok: bool | None
    detail: str


class DoctorQuery(msgspec.Struct, frozen=True):
    """Whether every page of the book's files is read."""

    files: bool = False


class DoctorData(msgspec.Struct, frozen=True, kw_only=True):
    checks: list[Check]
    topics_left_out: int
    files_checked: bool
    may_check_files: bool


async def doctor(view: View) -> DoctorData:
    may_check = view.principal.role >= Role.OPERATOR
    if view.fields.files and not may_check:
        raise PermissionDenied("only an operator may check all files", required="operator")
    survey = await view.context.surveyor.read()
    checks = [*_installation()]
    for part in await part_health(view, survey):
        checks.append(Check(name=part.part, ok=part.ok, detail=f"{part.kind}: {part.detail}"))
    findings = findings_of(survey)
    for finding in findings:
        checks.append(Check(name=finding.what, ok=None if finding.level == "warn" else False, detail=finding.detail))
    found = {finding.what for finding in findings}
    sound = [each for each in survey.topics if each.problem is None]
    for each in sound[:TOPICS_MAX]:
        detail = f"epoch {each.epoch}, {each.records:,} records, {each.lag:,} not replicated yet"
        name = f"Topic {each.topic}"
        checks.append(Check(name=name, ok=None if name in found else True, detail=detail))
    if view.fields.files:
        checks += await asyncio.to_thread(_files, view.book.settings.folder.expanduser())
    return DoctorData(
        checks=checks,
        topics_left_out=max(0, len(sound) - TOPICS_MAX) + survey.topics_left_out,
        files_checked=view.fields.files,
        may_check_files=may_check,
    )


@cache
def _installation() -> list[Check]:
    """Return the checks of the installation, which does not change while the server runs."""
    checks = [
        Check(name="Tidebook", ok=None, detail=tidebook.__version__),
        Check(name="Python", ok=sys.version_info >= (3, 11), detail=platform.python_version()),
        Check(name="SQLite", ok=True, detail=apsw.sqlitelibversion()),
        Check(name="Java", ok=None, detail="found" if shutil.which("java") else "not found: needed for Spark only"),
    ]
    for name, module in EXTRAS.items():
        detail = "installed" if find_spec(module) is not None else "not installed"
        checks.append(Check(name=f"Extra {name}", ok=None, detail=detail))
    return checks


def _files(folder: Path) -> list[Check]:
    """Check every SQLite file of the folder; this reads all of it, and changes nothing."""
    checks = []
    for path in sorted(folder.glob("*.db")):
        damage = find_file_damage(path, PROBLEMS_MAX)
        detail = "; ".join(damage)[:500] or "no damage found"
        checks.append(Check(name=f"File {path.name}", ok=not damage, detail=detail))
    return checks


PAGES = (Page("doctor", DOCTOR_PAGE, doctor, DoctorQuery),)
