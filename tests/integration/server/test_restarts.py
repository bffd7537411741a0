"""Restarts under load, by SIGTERM and kill -9: remote books continue, and every acknowledged write exists once."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

import tidebook
from tests.integration.server.running import free_port, served_by_command
from tidebook import Book, Event, OutcomeUnknown

WRITERS = 6


class Load:
    """Writers of one remote book that append and put numbers until they are asked to stop."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self.stopping = False
        self.appended: dict[str, int] = {}
        self.put: list[str] = []
        #: Puts that a crash interrupted: the server reports their outcome as unknown.
        self.unknown: list[str] = []
        self._progress = asyncio.Condition()

    async def append(self, name: str) -> None:
        """Append numbers to one journal."""
        self.appended[name] = 0
        while not self.stopping:
            done = await self._book.journal("orders").append(name, [Event(self.appended[name])])
            assert done.first == self.appended[name] + 1
            self.appended[name] += 1
            await self._report()

    async def put_entries(self, name: str) -> None:
        """Put keyed entries into a queue, each key once."""
        number = 0
        while not self.stopping:
            key, number = f"{name}-{number}", number + 1
            try:
                assert (await self._book.queue("mail").put(key, key=key)).inserted == 1
                self.put.append(key)
            except OutcomeUnknown:
                self.unknown.append(key)
            await self._report()

    async def _report(self) -> None:
        async with self._progress:
            self._progress.notify_all()

    @property
    def _counts(self) -> tuple[int, ...]:
        return (*self.appended.values(), len(self.put))

    async def progressed(self) -> None:
        """Return once every journal and the queue have received more items."""
        before = self._counts
        async with self._progress:
            await self._progress.wait_for(
                lambda: (
                    len(before) == WRITERS + 1
                    and all(now > then for now, then in zip(self._counts, before, strict=True))
                )
            )


async def wait_for_exit(process: subprocess.Popen[str]) -> int:
    return await asyncio.to_thread(process.wait, 60)


@pytest.mark.timeout(300)
async def test_remote_books_continue_over_restarts(tmp_path: Path, long_form: bool) -> None:
    signals = [signal.SIGTERM, signal.SIGKILL] * (4 if long_form else 1)
    arguments = ("--port", str(free_port()), "--book", str(tmp_path / "book"))
    with ExitStack() as servers:
        url, process = servers.enter_context(served_by_command(*arguments))
        async with tidebook.open(url) as remote:
            load = Load(remote)
            writing = [asyncio.create_task(load.append(f"w-{n}")) for n in range(WRITERS)]
            writing += [asyncio.create_task(load.put_entries(f"p-{n}")) for n in range(WRITERS)]
            await asyncio.sleep(0)  # until the writers have taken their names
            for each in signals:
                await asyncio.wait_for(load.progressed(), 60)
                unknown = len(load.unknown)
                process.send_signal(each)
                code = await wait_for_exit(process)
                assert code == (0 if each == signal.SIGTERM else -signal.SIGKILL)
                _, process = servers.enter_context(served_by_command(*arguments))
                if each == signal.SIGTERM:
                    assert len(load.unknown) == unknown  # the requests in flight have finished
            await asyncio.wait_for(load.progressed(), 60)
            load.stopping = True
            await asyncio.wait_for(asyncio.gather(*writing), 60)
        process.send_signal(signal.SIGTERM)
        assert await wait_for_exit(process) == 0
    async with tidebook.open(tmp_path / "book") as book:
        for name, count in load.appended.items():
            assert [event.payload async for event in book.journal("orders").read(name)] == list(range(count))
        found = [job.data for job in await book.queue("mail").claim(10_000)]
        assert len(found) == len(set(found))
        assert set(load.put) <= set(found) <= {*load.put, *load.unknown}
