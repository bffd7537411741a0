"""Whether a book responds: concurrent checks share one request to its log and one to its store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import tidebook
from tidebook import Unavailable
from tidebook.server.book_checks import BookChecks


async def test_concurrent_checks_share_one_request_to_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with tidebook.open(tmp_path) as book:
        checks, count, answer = BookChecks(book), 0, asyncio.Event()

        async def topics() -> list[str]:
            nonlocal count
            count += 1
            await answer.wait()
            raise Unavailable("the log is down")

        monkeypatch.setattr(book.log, "topics", topics)
        asking = [asyncio.create_task(checks.run()) for _ in range(50)]
        await asyncio.sleep(0)
        asking[0].cancel()  # the others still get the result
        answer.set()
        _, *results = await asyncio.gather(*asking, return_exceptions=True)
        assert [(each.name, each.ok, each.reason) for each in results[0]] == [  # type: ignore[union-attr]
            ("log", False, "the log is down"),
            ("store", True, None),
        ]
        assert results == [results[0]] * 49
        assert count == 1
        monkeypatch.undo()
        assert [each.ok for each in await checks.run()] == [True, True]
        await checks.close()


async def test_a_check_that_hangs_ends_with_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with tidebook.open(tmp_path) as book:
        checks = BookChecks(book)
        monkeypatch.setattr(book.store, "topics", asyncio.Event().wait)
        asking = asyncio.create_task(checks.run())
        await asyncio.sleep(0)
        await asyncio.wait_for(checks.close(), 3)
        with pytest.raises(asyncio.CancelledError):
            await asking
