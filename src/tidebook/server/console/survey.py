"""A survey of the whole book: the progress of every topic, its queues, outbox topics and regions, and its problems.

A book may have ten thousand topics, so no page waits for a new survey: it shows the last one with its age, and starts
the next one in the background.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, Final, TypeVar, cast

import msgspec

from tidebook.core.errors import TidebookError
from tidebook.core.replication_plan import Parked, first_unreplicated_offset
from tidebook.outbox.port import OutboxTopicStatus
from tidebook.replication.status import JobStatus, read_job_status
from tidebook.server.console.counts import EXACT_MAX, Count, QueueNumbers, count_queue
from tidebook.tags.horizon import NEVER_MS, Horizon, HorizonStatus, status_of
from tidebook.wal.region import RegionStatus
from tidebook.wiring.book import Book

R = TypeVar("R")

#: A survey younger than this is shown without starting a new one.
FRESH_S: Final = 2.0
#: The maximum share of the time for surveys, so that a large book is not surveyed all the time.
SHARE: Final = 0.1
#: How long the first page waits for the first survey.
FIRST_WAIT_S: Final = 1.0
TOPICS_MAX: Final = 20_000
REGIONS_MAX: Final = 50
QUEUES_MAX: Final = 1_000
PARKED_MAX: Final = 100
#: How many topics are read at once; after each such group, other requests may run.
TOPICS_AT_ONCE: Final = 20
#: The age of the first unreplicated record is read for this many topics: those that lag most.
LAGGING_MAX: Final = 20
#: How long one part of a survey may take.
PART_S_MAX: Final = 20.0

WAL_TOPIC: Final = re.compile(r"wal\.(.+)\.(0|[1-9][0-9]*)\.data")


class TopicSurvey(msgspec.Struct, frozen=True, kw_only=True):
    """One topic with journals."""

    topic: str
    partitions: int
    epoch: int
    #: Records in the log, and those that are not replicated yet.
    records: int
    lag: int
    #: The sum of the end offsets, from which rates are computed.
    end: int
    #: The age of the oldest unreplicated record; None if it was not read.
    lag_s: float | None = None
    #: Appended records per second since the previous survey; None in the first one.
    rate: float | None = None
    #: The partition that is replicated to the earliest log time, and that time; -1 if none of it is replicated.
    slowest: int = 0
    slowest_ms: int = NEVER_MS
    problem: str | None = None


class RegionSurvey(msgspec.Struct, frozen=True, kw_only=True):
    """One region of a write-ahead log."""

    namespace: str
    region: int
    status: RegionStatus | None = None
    problem: str | None = None


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """The book as it was at `at_ms`."""

    at_ms: int
    took_s: float
    topics: list[TopicSurvey] = []
    #: The number of topics above the bound, which are not surveyed.
    topics_left_out: int = 0
    queues: list[QueueNumbers] = []
    outbox: list[OutboxTopicStatus] = []
    regions: list[RegionSurvey] = []
    #: How many records of each topic are parked, counted up to a bound in all.
    parked: dict[str, int] = {}
    job: JobStatus | None = None
    #: The horizon of streams by tag; None if not all topics were read.
    horizon: HorizonStatus | None = None
    #: Parts of the book that did not answer, and why.
    problems: dict[str, str] = {}


class Surveyor:
    """Surveys a book when a page asks for it, one survey at a time."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._last: Survey | None = None
        self._read_s = -1e9
        self._task: asyncio.Task[None] | None = None

    async def read(self, *, wait_s: float = FIRST_WAIT_S) -> Survey:
        """Return the last survey and start another one if it is old; wait briefly for the first one."""
        last = self._last
        due_s = FRESH_S if last is None else max(FRESH_S, last.took_s / SHARE)
        if (self._task is None or self._task.done()) and time.monotonic() - self._read_s >= due_s:
            self._task = asyncio.create_task(self._survey())
        if last is None and self._task is not None:
            await asyncio.wait((self._task,), timeout=wait_s)
        return self._last or Survey(at_ms=self._book.clock.now_ms(), took_s=0.0)

    async def close(self) -> None:
        """Stop a running survey."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _survey(self) -> None:
        started_s = time.monotonic()
        at_ms = self._book.clock.now_ms()
        problems: dict[str, str] = {}
        names = await _result_of("log and store", self._topic_names(), ([], []), problems)
        journals, regions = names
        topics = await _result_of("topics", self._topics(journals[:TOPICS_MAX], at_ms), [], problems)
        self._last = Survey(
            at_ms=at_ms,
            took_s=time.monotonic() - started_s,
            topics=topics,
            topics_left_out=max(0, len(journals) - TOPICS_MAX),
            queues=await _result_of("queues", self._queues(), [], problems),
            outbox=await _result_of("outbox", self._book.outbox.status(count_max=EXACT_MAX), [], problems),
            regions=await _result_of("write-ahead logs", self._regions(regions), [], problems),
            parked=await _result_of("parked records", self._parked(), {}, problems),
            job=await _result_of("pipeline", read_job_status(self._book.store), None, problems),
            horizon=horizon_of(topics, at_ms) if len(topics) == len(journals) else None,
            problems=problems,
        )
        self._read_s = time.monotonic()

    async def _topic_names(self) -> tuple[list[str], list[tuple[str, int]]]:
        journals = await self._book.topics()
        found = (WAL_TOPIC.fullmatch(each) for each in await self._book.log.topics())
        return journals, sorted((match[1], int(match[2])) for match in found if match)

    async def _topics(self, names: list[str], at_ms: int) -> list[TopicSurvey]:
        before = {} if self._last is None else {each.topic: each for each in self._last.topics}
        elapsed_s = 0.0 if self._last is None else (at_ms - self._last.at_ms) / 1000
        found: list[TopicSurvey] = []
        for start in range(0, len(names), TOPICS_AT_ONCE):
            for each in await asyncio.gather(*map(self.topic, names[start : start + TOPICS_AT_ONCE])):
                last = before.get(each.topic)
                if last is not None and elapsed_s > 0 and last.epoch == each.epoch:
                    each = msgspec.structs.replace(each, rate=max(0.0, each.end - last.end) / elapsed_s)
                found.append(each)
            await asyncio.sleep(0)  # let other requests run: an embedded book never suspends
        lagging = sorted((each for each in found if each.lag), key=lambda each: -each.lag)[:LAGGING_MAX]
        ages = {each.topic: await self._lag_s(each, at_ms) for each in lagging}
        return [msgspec.structs.replace(each, lag_s=ages[each.topic]) if each.topic in ages else each for each in found]

    async def topic(self, topic: str) -> TopicSurvey:
        """Return the numbers of one topic as they are now."""
        log, store = self._book.log, self._book.store
        empty = TopicSurvey(topic=topic, partitions=0, epoch=0, records=0, lag=0, end=0)
        try:
            pointers, config = await store.pointers(topic), await store.topic_config(topic)
            if config is None:
                return empty
            records = lag = last = 0
            for number in range(config.partitions):
                start, end = await log.start(topic, number), await log.end(topic, number)
                first = first_unreplicated_offset(pointers.get(number), topic, number, config)
                records, lag, last = records + end - start, lag + max(0, end - max(start, first)), last + end
            times = {n: pointers[n].time_ms if n in pointers else NEVER_MS for n in range(config.partitions)}
            slowest = min(times, key=times.__getitem__)
            return TopicSurvey(
                topic=topic,
                partitions=config.partitions,
                epoch=config.epoch,
                records=records,
                lag=lag,
                end=last,
                slowest=slowest,
                slowest_ms=times[slowest],
            )
        except TidebookError as error:
            return msgspec.structs.replace(empty, problem=str(error))

    async def _lag_s(self, topic: TopicSurvey, now_ms: int) -> float | None:
        log, store, name = self._book.log, self._book.store, topic.topic
        times: list[int] = []
        try:
            pointers, config = await store.pointers(name), await store.topic_config(name)
            if config is None:
                return None
            for number in range(config.partitions):
                first = first_unreplicated_offset(pointers.get(number), name, number, config)
                first, end = max(first, await log.start(name, number)), await log.end(name, number)
                if first < end:
                    page = await log.read(name, number, start=first, stop=end, limit=1)
                    times += (record.timestamp_ms for record in page.records)
        except TidebookError:
            return None  # the survey of the topic reports it
        return max(0, now_ms - min(times)) / 1000 if times else None

    async def _queues(self) -> list[QueueNumbers]:
        found: list[QueueNumbers] = []
        for name in (await self._book.queues.names())[:QUEUES_MAX]:
            browser = await self._book.queues.browser(name)
            if browser is not None:
                found.append(await count_queue(name, browser))
            await asyncio.sleep(0)
        return found

    async def _parked(self) -> dict[str, int]:
        found: dict[str, int] = {}
        async with aclosing(cast(AsyncGenerator[Parked, None], self._book.store.parked())) as records:
            async for each in records:
                found[each.topic] = found.get(each.topic, 0) + 1
                if sum(found.values()) == PARKED_MAX:
                    break
        return found

    async def _regions(self, names: list[tuple[str, int]]) -> list[RegionSurvey]:
        found: list[RegionSurvey] = []
        for namespace, id in names[:REGIONS_MAX]:
            try:
                region = await self._book.wal(namespace).open_region(id, writable=False)
                found.append(RegionSurvey(namespace=namespace, region=id, status=await region.status()))
            except TidebookError as error:
                found.append(RegionSurvey(namespace=namespace, region=id, problem=str(error)))
        return found


async def _result_of(part: str, call: Awaitable[R], missing: R, problems: dict[str, str]) -> R:
    """Return what a part of the book returns, or `missing` if it fails or takes too long, and record why."""
    try:
        async with asyncio.timeout(PART_S_MAX):
            return await call
    except TimeoutError:
        problems[part] = f"no response within {PART_S_MAX:g} s"
    except TidebookError as error:
        problems[part] = str(error)
    return missing


def horizon_of(topics: list[TopicSurvey], now_ms: int) -> HorizonStatus | None:
    """Return the horizon of streams by tag, what holds it back, and what is not replicated.

    Return None without any topic, or if one of them has a problem.

    The tags' own status reads all partitions at once, which would stop the server for seconds in a book of many topics.
    """
    if not topics or any(each.problem is not None for each in topics):
        return None
    least = min(topics, key=lambda each: each.slowest_ms)
    most_ms = max(each.slowest_ms for each in topics)
    found = Horizon(least.slowest_ms, most_ms, least.topic, least.slowest)
    return status_of(found, sum(each.lag for each in topics), now_ms=now_ms)


def summary(survey: Survey) -> dict[str, Any]:
    """Return the numbers that the overview shows."""
    return {
        "topics": len(survey.topics) + survey.topics_left_out,
        "records": sum(each.records for each in survey.topics),
        "lag": sum(each.lag for each in survey.topics),
        "queues": len(survey.queues),
        "waiting": _total([count for each in survey.queues for count in (each.due, each.later, each.processing)]),
        "dead": _total([each.dead for each in survey.queues]),
        "outbox_waiting": _total([Count(each.waiting, not each.waiting_is_bound) for each in survey.outbox]),
        "held_bytes": sum(each.status.held_bytes for each in survey.regions if each.status is not None),
    }


def _total(counts: list[Count]) -> Count:
    return Count(sum(each.value for each in counts), exact=all(each.exact for each in counts))
