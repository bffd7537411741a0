"""The outbox relay as a supervised part, the health of a book, settling it, and the blocking form of `running`."""

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
        while any(each.waiting for each in await self._outbox.status()):  # noqa: ASYNC110  the relay has no wake-up
            await asyncio.sleep(SETTLE_POLL_S)


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether this process can use the book, and the state of the parts that it runs."""

    #: The problems, one sentence each; empty if the process is healthy.
    problems: tuple[str, ...] = ()
    #: The replication of this process; None if it does not replicate.
    replication: InlineStatus | None = None
    running: tuple[RunStatus, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems


async def book_health(
    log: Log, store: StoreWriter, replication: InlineReplication | None, supervisors: Sequence[Supervisor]
) -> Health:
    """Check that log and store respond, and collect the states of the replication and of all running parts."""
    problems = []
    for name, part in (("log", log), ("store", store)):
        try:
            await part.topics()
        except TidebookError as error:
            problems.append(f"{name}: {error}")
    status = None if replication is None else replication.status()
    if status is not None:
        if status.state == "waiting" and status.last_error is not None:
            problems.append(f"replication: {status.last_error}")
        if status.silent_holder is not None:
            problems.append(f"replication: {status.silent_holder}")
        problems += (f"replication: {at} is stopped: {reason}" for at, reason in status.stopped.items())
    running = tuple(each for supervisor in supervisors for each in supervisor.status())
    problems += (f"{each.name} is {each.state}: {each.problem}" for each in running if not each.healthy)
    return Health(problems=tuple(problems), replication=status, running=running)


async def settle_book(log: Log, store: StoreWriter, supervisors: Sequence[Supervisor], *, clear_tags: bool) -> None:
    """Replicate everything, move the horizon past it and settle all parts, until nothing new is appended."""
    appended = True
    while appended:
        # Projections over whole topics wait for the horizon too, even if no event has a tag.
        done = await replicate_to_end(log, store, clear_tags=clear_tags, tick=True)
        for at, reason in done.stopped.items():
            raise Unavailable(f"the book cannot settle: {at} is stopped: {reason}")
        ends = await _ends(log, store)
        # A part may create work for any other, as a process manager does for a queue's worker, and their order is
        # arbitrary, so there are as many passes as parts.
        for _ in range(sum(len(supervisor.status()) for supervisor in supervisors)):
            for supervisor in supervisors:
                await supervisor.settle()
        appended = await _is_appended_to(log, ends, await _ends(log, store))


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
    """Enter and leave the result of `Book.running` on the portal, as a `with` block."""
    supervisor = portal.run(block.__aenter__())
    try:
        yield SyncRunning(portal, supervisor)
    finally:
        portal.run(block.__aexit__(None, None, None))
