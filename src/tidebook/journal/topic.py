"""Open a topic: check its configuration against the log, set up its partitions, and start new epochs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence

import msgspec

from tidebook.core.action import Mark
from tidebook.core.bounds import TICK_AHEAD_MS_MAX
from tidebook.core.errors import Corrupt, Fenced, InvalidInput, OutcomeUnknown, TidebookError, Unavailable
from tidebook.core.key import journal_id, partition_of
from tidebook.core.position import Position
from tidebook.core.record import encode_record, is_record
from tidebook.core.replication_plan import Pointer, SliceWrites
from tidebook.core.topic_config import TopicConfig
from tidebook.journal.head_cache import HeadCache, adopt_hint
from tidebook.journal.reader import Reader
from tidebook.journal.settings import JournalSettings
from tidebook.log.port import Log, Outgoing, TopicState, last_record
from tidebook.runtime.backoff import Backoff
from tidebook.runtime.metrics import Metrics
from tidebook.runtime.process import forked_error, notify_of_forks
from tidebook.store.port import StoreWriter

#: How many journals of a topic have a cached address.
ADDRESSES_MAX = 8192
#: How often a topic in use is checked: it may have a new epoch, or have been recreated in the log.
CHECK_INTERVAL_S = 3.0
#: How long an end below the pointer may be outdated: a broker that is cut off is replaced as a leader within this time.
OUTDATED_END_S_MAX = 10.0


#: The head cache of a journal's partition, and its id as the key of its records.
Address = tuple[HeadCache, bytes]


class OpenTopic:
    """An open topic: its configuration and its partitions."""

    def __init__(
        self,
        log: Log,
        store: StoreWriter,
        topic: str,
        config: TopicConfig,
        settings: JournalSettings,
        metrics: Metrics,
        *,
        ends: Sequence[int],
    ) -> None:
        """`ends` are the end offsets of the partitions when the topic was checked."""
        self.config = config
        self._log = log
        self._store = store
        self._topic = topic
        #: Whether `check_epoch` must be called. A timer sets it, because reading the clock would slow down every
        #: append.
        self.check_due = False
        #: Cached, because up to Python 3.11 getting the loop costs every append a system call.
        self.loop = asyncio.get_running_loop()
        self._timer = self.loop.call_later(CHECK_INTERVAL_S, self._set_check_due)
        self._check_task: asyncio.Task[None] | None = None
        #: Why this topic can no longer be used; None while it can.
        self._superseded: TidebookError | None = None
        caches = [
            HeadCache(log, store, topic, number, config, settings, metrics) for number in range(config.partitions)
        ]
        for cache, end in zip(caches, ends, strict=True):
            cache.seen = end - 1
        self.partitions = [Reader(log, store, cache, settings, metrics) for cache in caches]
        self._addresses: dict[str, Address] = {}
        notify_of_forks(self)

    def inherited(self) -> None:
        """Refuse every use in a forked child, where tasks and drivers do not run; this costs an append nothing."""
        self._superseded, self.check_due = forked_error(f"topic {self._topic}"), True

    def partition(self, id: str) -> Reader:
        """Return the partition of a journal, by the configured partition count, not by the log's current one."""
        return self.partitions[partition_of(id, self.config.partitions)]

    def address(self, id: str) -> Address:
        """Return the address of a journal; an id in use is validated and hashed only once."""
        address = self._addresses.get(id) if type(id) is str else None
        if address is None:
            address = self.partition(journal_id(id)).cache, id.encode()
            if len(self._addresses) >= ADDRESSES_MAX:
                self._addresses.clear()
            self._addresses[id] = address
        return address

    def addresses(self, ids: Sequence[str]) -> list[Address]:
        """Return the addresses of many journals, most of them cached."""
        known = self._addresses.get
        try:
            return [known(id) or self.address(id) for id in ids]
        except TypeError:  # an id that is not hashable: `address` raises an error that names it
            return list(map(self.address, ids))

    def check_epoch(self) -> None:
        """Raise Fenced if the topic has a newer epoch, Corrupt if the log was recreated; else start the next check.

        It raises the error that an earlier check found. The checks are needed because an appender that does not confirm
        reads nothing, and would report success forever; and because a recreated log that has grown past what this
        process saw differs from the old one only by its id.
        """
        if self._superseded is not None:
            raise self._superseded.with_traceback(None)
        self.check_due = False
        self._check_task = asyncio.create_task(self._run_check())

    def _set_check_due(self) -> None:
        self.check_due = True

    async def _run_check(self) -> None:
        try:
            self._superseded = await self._find_change()
        except TidebookError:
            pass  # appends work without the store, and the next check is a retry
        if self._superseded is not None:
            self.check_due = True
        else:
            self._timer = self.loop.call_later(CHECK_INTERVAL_S, self._set_check_due)

    async def _find_change(self) -> TidebookError | None:
        config = await self._store.topic_config(self._topic)
        if config is not None and config.epoch > self.config.epoch:
            return Fenced(
                f"topic {self._topic} has moved on from epoch {self.config.epoch} to {config.epoch}: "
                "open the book again"
            )
        state = await self._log.topic(self._topic)
        if state is not None and state.topic_id != self.config.topic_id:
            return different_log(self._topic, found=state.topic_id, known=self.config.topic_id)
        return None

    async def close(self) -> None:
        if self._check_task is not None:
            self._check_task.cancel()
            await asyncio.gather(self._check_task, return_exceptions=True)
        self._timer.cancel()
        for partition in self.partitions:
            await partition.cache.close()


def different_log(topic: str, *, found: str, known: str) -> Corrupt:
    """Return the error for a topic whose id in the log differs from the configured one."""
    return Corrupt(
        f"topic {topic}: the log has another incarnation of it ({found}) than the store was filled from ({known}): "
        f"{adopt_hint(topic)}"
    )


async def open_topic(
    log: Log, store: StoreWriter, topic: str, config: TopicConfig | None, settings: JournalSettings, metrics: Metrics
) -> OpenTopic:
    """Open a topic, and create it if it has no configuration yet; raise Corrupt if the log does not match it."""
    if config is None:
        state = await log.topic(topic)
        if state is None:
            state = await log.create_topic(topic, settings.partitions, limit_bytes=settings.limit_bytes)
        else:
            await _refuse_messages(log, state)
        config = await store.set_topic_config(
            topic, settings.topic_config(state.topic_id, state.partitions), expected=None
        )
    ends = await check_topic(log, store, topic, config)
    if not config.admitted:
        config = await _admit(log, store, topic, config)
    await begin_epoch(store, topic, config)
    return OpenTopic(log, store, topic, config, settings, metrics, ends=ends)


async def _refuse_messages(log: Log, state: TopicState) -> None:
    """Raise InvalidInput for a topic with other messages: each side would treat the other's records as damaged."""
    found = await last_record(log, state)
    if found is not None and not is_record(found.value):
        raise InvalidInput(
            f"topic {state.topic} is in the log already and holds messages that no journal wrote (an outbox's, or "
            "another program's): use another topic for the journals, or publish to another one"
        )


async def _admit(log: Log, store: StoreWriter, topic: str, config: TopicConfig) -> TopicConfig:
    """Raise the time of a new topic to the greatest time of the book, before anything is appended to it.

    The topic is registered by now, so it holds back the horizon of tag queries. A query that did not see it
    registered had read the pointers before this function reads the book's time, so no later append can be below what
    that query delivered.
    """
    book_ms = await store.replicated_ms()
    # On a log that can be reached without the store, the first record identifies a topic of journals.
    if book_ms or not log.end_is_linearizable:
        value = encode_record(Mark(config.epoch, book_ms), limit_bytes=config.limit_bytes)
        numbers = range(config.partitions)
        try:
            marks = await asyncio.gather(*(log.append(Outgoing(topic, number, None, value)) for number in numbers))
        except OutcomeUnknown as error:  # an extra mark is harmless, and the caller has written nothing
            raise Unavailable(f"topic {topic} could not be opened: {error}") from error
        if (now_ms := min(mark.timestamp_ms for mark in marks)) + TICK_AHEAD_MS_MAX < book_ms:
            # Readers ignore a tick so far ahead, so appends would be ordered before delivered events.
            raise Unavailable(
                f"topic {topic}: the log's clock is at {now_ms} ms, but the book's time is {book_ms} ms: set the clock "
                "that is wrong and open the topic again"
            )
    return await store.set_topic_config(topic, msgspec.structs.replace(config, admitted=True), expected=config)


async def check_topic(log: Log, store: StoreWriter, topic: str, config: TopicConfig) -> list[int]:
    """Raise Corrupt if the log does not have the configured topic; return the end offsets of its partitions."""
    hint = adopt_hint(topic)
    state = await log.topic(topic)
    if state is None:
        raise Corrupt(f"topic {topic} is in the store but not in the log: restore the log, or {hint}")
    if state.topic_id != config.topic_id:
        raise different_log(topic, found=state.topic_id, known=config.topic_id)
    if state.partitions < config.partitions:
        raise Corrupt(
            f"topic {topic}: it was created with {config.partitions} partitions and has {state.partitions} now"
        )
    numbers = range(config.partitions)
    pointers = await asyncio.gather(*(store.pointer(topic, number) for number in numbers))
    reached = [
        0 if pointer is None or pointer.position.epoch != config.epoch else pointer.position.offset + 1
        for pointer in pointers
    ]
    ends = await asyncio.gather(*(_end(log, topic, number, reached[number]) for number in numbers))
    for number, end in zip(numbers, ends, strict=True):
        if end < reached[number]:
            raise Corrupt(
                f"topic {topic}, partition {number}: the log ends at {end}, but the store was replicated through "
                f"{reached[number] - 1}: {hint}"
            )
    return ends


async def _end(log: Log, topic: str, partition: int, reached: int) -> int:
    """Return the end offset of a partition; ask again for a while if it is below `reached` and may be outdated."""
    backoff, began_s = Backoff(first_s=0.1, max_s=1.0), time.monotonic()
    while (end := await log.end(topic, partition)) < reached and not log.end_is_linearizable:
        if time.monotonic() - began_s > OUTDATED_END_S_MAX:
            break
        await asyncio.sleep(backoff.next_s())
    return end


async def adopt_topic(log: Log, store: StoreWriter, topic: str, settings: JournalSettings) -> TopicConfig:
    """Start a new epoch on the log as it is: the store keeps its state, and records of older epochs become void.

    If the log matches the configuration nothing is adopted, because a new epoch would void unreplicated records.
    """
    config = await store.topic_config(topic)
    state = await log.topic(topic)
    if state is None:
        partitions = config.partitions if config is not None else settings.partitions
        limit_bytes = config.limit_bytes if config is not None else settings.limit_bytes
        state = await log.create_topic(topic, partitions, limit_bytes=limit_bytes)
    if config is None:
        return await store.set_topic_config(
            topic, settings.topic_config(state.topic_id, state.partitions), expected=None
        )
    if state.partitions < config.partitions:
        raise Corrupt(f"topic {topic}: {config.partitions} partitions are needed and the log has {state.partitions}")
    try:
        await check_topic(log, store, topic, config)
    except Corrupt:
        config = await _start_epoch(log, store, topic, config, state.topic_id)
    await begin_epoch(store, topic, config)
    return config


async def _start_epoch(log: Log, store: StoreWriter, topic: str, config: TopicConfig, topic_id: str) -> TopicConfig:
    """Set the configuration of a new epoch, and return it, or the one that a concurrent process has set.

    A mark of the new epoch is written first: a process with the old configuration stops at it and reports no success.
    The configuration names the marks of the process that set it. All records of the epoch come after those marks; a
    process that came second may have written its marks after acknowledged appends.
    """
    # The tick is above all times of the old epoch: offsets start again, and among tagged events of the same time the
    # lower offset comes first.
    known = await store.pointers(topic)
    tick_ms = max((pointer.time_ms for pointer in known.values()), default=-1) + 1
    epoch = config.epoch + 1
    value = encode_record(Mark(epoch, tick_ms), limit_bytes=config.limit_bytes)
    numbers = range(config.partitions)
    marks = await asyncio.gather(*(log.append(Outgoing(topic, number, None, value)) for number in numbers))
    began = tuple((mark.offset, max(mark.timestamp_ms, tick_ms)) for mark in marks)
    proposed = msgspec.structs.replace(config, topic_id=topic_id, epoch=epoch, began=began)
    return await store.set_topic_config(topic, proposed, expected=config)


async def begin_epoch(store: StoreWriter, topic: str, config: TopicConfig) -> None:
    """Move the pointers to the marks of the epoch: records before them are void, and the log may have lost them.

    This is idempotent, and any process may do it: the one that set the configuration may have crashed before this.
    """
    if not config.began:
        return
    known = await store.pointers(topic)
    numbers = range(len(config.began))
    if all(number in known and known[number].position.epoch >= config.epoch for number in numbers):
        return
    times_ms = await _epoch_start_times(store, topic, config, known)
    for number, time_ms in enumerate(times_ms):
        begun = Pointer(Position(config.epoch, config.began[number][0]), time_ms)
        pointer = known.get(number)
        while pointer is None or pointer.position.epoch < config.epoch:
            with contextlib.suppress(Fenced):  # a replicator of the old epoch, or another process that begins this one
                await store.apply(SliceWrites(topic, number, pointer, begun, ()))
                break
            pointer = await store.pointer(topic, number)


async def _epoch_start_times(
    store: StoreWriter, topic: str, config: TopicConfig, known: Mapping[int, Pointer]
) -> Sequence[int]:
    """Return the log time at which the epoch begins in each partition, above all times of the old epoch.

    The times are fixed by compare-and-set: replicators that start from pointers with different times would give the
    same tagged events different times.
    """
    name = f"began/{topic}/{config.topic_id}/{config.epoch}"
    while (stored := await store.setting(name)) is None:
        times_ms = [
            max(time_ms, known[number].time_ms + 1 if number in known else 0)
            for number, (_, time_ms) in enumerate(config.began)
        ]
        with contextlib.suppress(OutcomeUnknown):
            await store.set_setting(name, msgspec.json.encode(times_ms).decode(), expected=None)
    return msgspec.json.decode(stored, type=list[int])
