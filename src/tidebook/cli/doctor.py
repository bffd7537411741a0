"""`tidebook doctor`: what is installed, whether the book opens, and whether log and store fit together."""

from __future__ import annotations

import platform
import shutil
import sys
from importlib.util import find_spec

import typer

import tidebook
from tidebook.cli import output
from tidebook.cli.options import BookOption, JsonOption, chosen, run
from tidebook.core.errors import TidebookError
from tidebook.wiring.status import file_damage, topic_status

EXTRAS = {
    "kafka": "confluent_kafka",
    "cassandra": "acsylla",
    "postgres": "psycopg",
    "outbox": "sqlalchemy",
    "mysql": "pymysql",
    "spark": "pyspark",
    "server": "starlette",
}


def doctor(book: BookOption = None, json: JsonOption = False) -> None:
    """Check this installation and a book; exit code 1 where something is wrong."""
    wrong: list[str] = []

    def say(check: str, ok: bool | None, detail: str) -> None:
        """`ok` is None for what is merely told."""
        if ok is False:
            wrong.append(check)
        mark = {True: "ok  ", False: "BAD ", None: "    "}[ok]
        output.emit({"check": check, "ok": ok, "detail": detail}, f"{mark}{check}: {detail}")

    async def go() -> None:
        import apsw

        say("python", sys.version_info >= (3, 11), platform.python_version())
        known = tuple(int(part) for part in apsw.sqlitelibversion().split("."))
        say("sqlite", known >= (3, 51, 3), apsw.sqlitelibversion())
        java = shutil.which("java")
        say("java", None, java or "not found: needed for Spark only")
        for name, module in EXTRAS.items():
            there = find_spec(module) is not None
            say(f"extra {name}", None, "installed" if there else f"not installed: pip install 'tidebook[{name}]'")
        try:
            async with tidebook.open(chosen(book)) as opened:
                say("book", True, str(opened.settings.folder.resolve()))
                for name, damage in file_damage(opened).items():
                    found = f"{damage[0]} ({len(damage)} findings): restore a copy of it" if damage else "whole"
                    say(f"file {name}", not damage, " ".join(found.split()))
                for topic in await opened.topics():
                    try:
                        status = await topic_status(opened, topic)
                        detail = f"epoch {status.epoch}, {status.records:,} records, {status.lag:,} not replicated yet"
                        say(f"topic {topic}", True, detail)
                    except TidebookError as error:
                        say(f"topic {topic}", False, str(error))
        except TidebookError as error:
            say("book", False, str(error))

    run(go, json=json)
    if wrong:
        raise typer.Exit(1)
