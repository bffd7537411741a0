"""`tidebook projection`: its output, and its effect on the processes that run the projection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import tidebook
from tests.unit.cli.conftest import Cli, refused
from tidebook.core.errors import ProjectionStopped
from tidebook.core.event import Event
from tidebook.wiring.book import Book

APP = """
from sqlalchemy import Column, Integer, MetaData, Table, create_engine
seen = Table("seen", MetaData(), Column("number", Integer, primary_key=True))

engine = create_engine("sqlite:///{file}")

def app(book):
    projection = book.projection("seen", topics=["orders"], into=engine, tables=[seen], retries=0)
    @projection
    def apply(tx, event):
        tx.execute(tx.table(seen).insert().values(number=int(event.data)))
    reminders = book.process("reminders", topics=["orders"])
    reminders(lambda effects, event: None)
    return [projection, reminders, book.worker("mail", print)]
"""


@pytest.fixture
def shop(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"shop_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(APP.replace("{file}", str(tmp_path / "read.db")))
    monkeypatch.syspath_prepend(tmp_path)
    assert cli("journal", "append", "orders", "o-0", "0").code == 0
    return f"{name}:app"


def in_app(folder: Path, shop: str, work: Callable[[Book, Any], Awaitable[None]]) -> None:
    """Run `work` while the projection runs, as in another process."""
    from importlib import import_module

    async def run() -> None:
        async with tidebook.open(folder, replicate=True) as book:
            projection, *_ = import_module(shop.split(":")[0]).app(book)
            async with book.running(projection):
                await work(book, projection)

    asyncio.run(run())


def rows(cli: Cli, *arguments: str) -> list[dict[str, Any]]:
    result = cli("projection", *arguments)
    assert result.code == 0, result.err
    return [json.loads(line) for line in result.out.splitlines()]


def test_the_projections_of_an_application_are_listed_and_controlled(cli: Cli, book: Path, shop: str) -> None:
    assert [row["state"] for row in rows(cli, "list", "--app", shop)] == ["never started"] * 2

    async def fail(book: Book, projection: Any) -> None:
        await book.journal("orders").append("o-1", [Event(1), Event("two"), Event(3)], append_id=bytes(16))
        with pytest.raises(ProjectionStopped):
            await book.settle()

    in_app(book, shop, fail)
    [status] = rows(cli, "status", "seen", "--app", shop)
    assert (status["state"], status["stopped"], status["processes"]) == ("stopped", 1, 0)
    [failed] = [each for each in status["slice_states"] if each["error"]]
    assert (failed["failed_event"], "ValueError" in failed["error"]) == ("orders/o-1/2", True)
    assert rows(cli, "resume", "seen", "--app", shop)[0]["retried"] == ["orders/o-1/2"]
    in_app(book, shop, fail)
    assert rows(cli, "skip", "seen", "--app", shop)[0]["skipped"] == ["orders/o-1/2"]
    assert rows(cli, "skip", "seen", "--app", shop)[0]["skipped"] == []

    async def settle(book: Book, _: Any) -> None:
        await book.settle()

    in_app(book, shop, settle)
    [status] = rows(cli, "status", "seen", "--app", shop)
    assert (status["state"], status["parked_events"][0]["event"]) == ("idle", "orders/o-1/2")
    assert rows(cli, "pause", "seen", "--app", shop) == [{"projection": "seen", "paused": True}]
    assert [row["state"] for row in rows(cli, "list", "--app", shop)][1] == "paused"
    assert rows(cli, "rebuild", "seen", "--app", shop) == [{"projection": "seen", "build": 2}]
    assert rows(cli, "resume", "seen", "--app", shop)[0]["paused"] is False


@pytest.mark.parametrize("replicated", [False, True])
def test_a_rebuild_of_a_projection_that_never_ran_applies_all_events(cli: Cli, shop: str, replicated: bool) -> None:
    if replicated:
        assert cli("pipeline", "replicate", "--once").code == 0
    assert rows(cli, "rebuild", "seen", "--app", shop) == [{"projection": "seen", "build": 2}]
    [status] = rows(cli, "status", "seen", "--app", shop)
    assert status["applied_to"] is not None
    from importlib import import_module

    module = import_module(shop.split(":")[0])
    with module.engine.connect() as connection:
        assert connection.execute(module.seen.select()).all() == [(0,)]


def test_a_projection_command_with_wrong_arguments_is_refused(cli: Cli, shop: str) -> None:
    refused(cli("projection", "status", "other", "--app", shop), 4, "it declares reminders, seen")
    refused(cli("projection", "status", "seen", "--app", shop), 4, "never started")
    refused(cli("projection", "rebuild", "reminders", "--app", shop), 2, "cannot be rebuilt")
    refused(cli("projection", "list", "--app", "no_such_module:app"), 2, "cannot be loaded")
