"""All tags of a journal are rewritten page by page, with their old numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tidebook.core.event import Event
from tidebook.core.key import Key
from tidebook.core.repair import Repair
from tidebook.replication.ticks import tick
from tidebook.store.port import next_repair_revision
from tidebook.tags.rebuild import write_journal
from tidebook.testing.replicating import replicate
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Section, Settings


class RecordingStore:
    """A store that records repairs."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.repairs: list[Repair] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def repair(self, repair: Repair) -> None:
        self.repairs.append(repair)
        await self._store.repair(repair)


async def test_no_repair_holds_a_whole_journal_and_rows_are_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidebook.tags.rebuild.PAGE_EVENTS", 7)
    async with Book(Settings(tmp_path, {"journal": Section(None, {"partitions": 1})})) as book:
        for n in range(10):
            await book.journal("t").append(
                "a", [Event(n, tags={"all", f"mod-{n % 3}"}), Event(n), Event(n, tags={"all"})]
            )
        await book.journal("t").delete("a", to=8)
        await replicate(book.log, book.store, "t")
        await tick(book.log, book.store, ["t"])
        await replicate(book.log, book.store, "t")
        tags = [tag async for tag in book.tags.list()]
        before = {tag: [event async for event in book.tags.read(tag)] for tag in tags}
        config, store = await book.store.topic_config("t"), RecordingStore(book.store)
        assert config is not None
        rev = await next_repair_revision(book.store, ["t"])
        written = await write_journal(store, Key("t", "a"), config, rev=rev)
        assert written == sum(map(len, before.values())) > 0
        assert len(store.repairs) == 4
        assert max(len(repair.tags) for repair in store.repairs) <= 14
        rows = {row for repair in store.repairs for row in repair.tags}
        assert rows == {event.row for events in before.values() for event in events}
        assert {tag: [event async for event in book.tags.read(tag)] for tag in tags} == before
