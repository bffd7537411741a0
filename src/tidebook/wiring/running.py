"""The outbox relay as a supervised part, and the implementation of a book's `health`, `settle` and `running`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Final

import msgspec

from tidebook.core.errors import TidebookError, Unavailable
from tidebook.log.port import Log
from tidebook.outbox.outbox import AsyncOutbox
from tidebook.replication.inline import InlineReplication, InlineStatus, replicate_to_end
from tidebook.replication.partition import Partition
from tidebook.replication.status import topic_configs
from tidebook.runtime.blocking_facade import BlockingFacade
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.runtime.supervisor import RunStatus, Supervisor, on_stop_signal
from tidebook.store.port import StoreWriter

#: How often `settle` checks a part that cannot signal that it has settled.
SETTLE_POLL_S: Final = 0.01


class OutboxRelay:
    """The relay of a book's outbox as a supervised part; each start makes a new relay."""

    name = "relay"

    def __init__(self, outbox: AsyncOutbox, *, threads: int | None = None) -> None:
        self._outbox = outbox
        self._threads = threads

    async def run(self) -> None:
        """Relay until cancelled; the batches in flight are then completed."""
        await self._outbox.relay(threads=self._threads)

    async def settle(self) -> None:
        """Return once no message waits; parked messages and those that wait for a retry do not count."""
        while any(each.waiting for each in await self._outbox.status()):  # noqa: ASYNC110  it has no wake-up
            await asyncio.sleep(SETTLE_POLL_S)


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether this process can use the book, and the parts that run in it."""

    #: The problems, one sentence each; empty if the process is healthy.
    problems: tuple[str, ...] = ()
    #: The replication of this process; None if it does not replicate.
    replication: InlineStatus | None = None
    running: tuple[RunStatus, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


class BookState:
    """Implements `Book.health` and `Book.settle` from the log, the store, and the parts that run in this process."""

    def __init__(
        self, log: Log, store: StoreWriter, replication: InlineReplication | None, supervisors: Sequence[Supervisor]
    ) -> None:
        self._log = log
        self._store = store
        self._replication = replication
        self._supervisors = supervisors

    async def health(self) -> Health:
        """Check that log and store respond, and collect the states of the replication and of all running parts."""
        problems = []
        for name, part in (("log", self._log), ("store", self._store)):
            try:
                await part.topics()
            except TidebookError as error:
                problems.append(f"{name}: {error}")
        replication = None if self._replication is None else self._replication.status()
        if replication is not None:
            if replication.state == "waiting" and replication.last_error is not None:
                problems.append(f"replication: {replication.last_error}")
            if replication.silent_holder is not None:
                problems.append(f"replication: {replication.silent_holder}")
            problems += (f"replication: {at} is stopped: {reason}" for at, reason in replication.stopped.items())
        running = tuple(each for supervisor in self._supervisors for each in supervisor.status())
        problems += (f"{each.name} is {each.state}: {each.problem}" for each in running if not each.healthy)
        return Health(problems=tuple(problems), replication=replication, running=running)

    async def settle(self, *, clear_tags: bool, timeout_s: float) -> None:
        """Replicate everything, move the horizon past it and settle all parts, until nothing new is appended."""
        try:
            async with asyncio.timeout(timeout_s):
                while await self._settle_once(clear_tags=clear_tags):
                    pass
        except TimeoutError as error:
            health = await self.health()
            names = ", ".join(["replication", *(each.name for each in health.running)])
            why = "; ".join(health.problems) or f"waiting for {names}"
            raise Unavailable(f"the book has not settled within {timeout_s:g} s: {why}") from error

    async def _settle_once(self, *, clear_tags: bool) -> bool:
        """Replicate everything and settle all parts; return whether something was appended in the meantime."""
        # Projections over whole topics wait for the horizon too, even if no event has a tag.
        done = await replicate_to_end(self._log, self._store, clear_tags=clear_tags, tick=True)
        for at, reason in done.stopped.items():
            raise Unavailable(f"the book cannot settle: {at} is stopped: {reason}")
        ends = await _ends(self._log, self._store)
        # A part may create work for any other, as a process manager does for a queue's worker, and their order is
        # arbitrary, so there are as many passes as parts.
        for _ in range(sum(len(supervisor.status()) for supervisor in self._supervisors)):
            for supervisor in self._supervisors:
                await supervisor.settle()
        return await _is_appended_to(self._log, ends, await _ends(self._log, self._store))


async def _ends(log: Log, store: StoreWriter) -> dict[Partition, int]:
    configs = await topic_configs(store)
    return {
        (topic, number): await log.end(topic, number)
        for topic, config in configs.items()
        for number in range(config.partitions)
    }


async def _is_appended_to(log: Log, before: Mapping[Partition, int], now: Mapping[Partition, int]) -> bool:
    """Return whether records other than marks, which have no key, were appended between two sets of end offsets."""
    for at, end in now.items():
        start = before.get(at, 0)
        while start < end:
            page = await log.read(*at, start=start, stop=end)
            if any(record.key is not None for record in page.records):
                return True
            start = page.next_offset
    return False


class SyncRunning(BlockingFacade[Supervisor]):
    """The blocking form of the supervisor that `running` returns."""

    def status(self) -> list[RunStatus]:
        """Return the state of each part, in the order in which they were given."""
        return self._target.status()

    def until_stopped(self) -> None:
        """Wait for SIGTERM or SIGINT in the main thread, then return; leaving the block then drains the parts."""
        stopped = threading.Event()
        with on_stop_signal(stopped.set):
            stopped.wait()


@contextmanager
def run_on_portal(portal: BlockingPortal, block: AbstractAsyncContextManager[Supervisor]) -> Iterator[SyncRunning]:
    """Run the block of an async book within a `with` block."""
    supervisor = portal.run(block.__aenter__())
    try:
        yield SyncRunning(portal, supervisor)
    finally:
        portal.run(block.__aexit__(None, None, None))
