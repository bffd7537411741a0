"""Opening a topic: its facts, checked against the log, and its partitions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from tidebook.core.action import Mark
from tidebook.core.errors import Corrupt, Fenced, TidebookError
from tidebook.core.key import journal_id, partition_of
from tidebook.core.metrics import Metrics
from tidebook.core.position import Position
from tidebook.core.record import encode_record
from tidebook.core.replication import Pointer, SliceWrites
from tidebook.core.topic import TopicFacts
from tidebook.journal.barrier import Barriers
from tidebook.journal.head_cache import HeadCache
from tidebook.journal.reader import Reader
from tidebook.journal.settings import JournalSettings
from tidebook.log.port import Log, Outgoing
from tidebook.store.port import StoreWriter

#: Journals whose address is remembered, a topic.
ADDRESSES_MAX = 8192
#: How often one that appends without confirming looks whether the topic has a new epoch.
LOOK_EVERY_S = 3.0


class OpenPartition:
    """One partition in use."""

    __slots__ = ("barriers", "cache", "number", "reader")

    def __init__(
        self,
        log: Log,
        store: StoreWriter,
        topic: str,
        number: int,
        facts: TopicFacts,
        settings: JournalSettings,
        metrics: Metrics,
    ) -> None:
        self.number = number
        self.cache = HeadCache(log, store, topic, number, facts, settings, metrics)
        self.barriers = Barriers(log, self.cache)
        self.reader = Reader(log, store, self.cache, self.barriers, settings, metrics)


#: A journal's partition, and its id as the key of records.
Address = tuple[OpenPartition, bytes]


class OpenTopic:
    """A topic whose facts are known, with its partitions."""

    def __init__(
        self,
        log: Log,
        store: StoreWriter,
        topic: str,
        facts: TopicFacts,
        settings: JournalSettings,
        metrics: Metrics,
    ) -> None:
        self.facts = facts
        self._store = store
        self._topic = topic
        #: It is time for `check_epoch`. A timer sets it: asking for the time would cost every append.
        self.due = False
        #: Asking for it costs every append a system call, up to Python 3.11.
        self.loop = asyncio.get_running_loop()
        self._timer = self.loop.call_later(LOOK_EVERY_S, self._be_due)
        self._looking: asyncio.Task[None] | None = None
        #: The epoch that the topic has moved on to, if it was seen to.
        self._moved_to: int | None = None
        self.partitions = [
            OpenPartition(log, store, topic, number, facts, settings, metrics) for number in range(facts.partitions)
        ]

        self._addresses: dict[str, Address] = {}

    def partition(self, id: str) -> OpenPartition:
        """The partition that holds this journal: by the frozen count, never by what the log says today."""
        return self.partitions[partition_of(id, self.facts.partitions)]

    def address(self, id: str) -> Address:
        """Where records of a journal go, its id checked: an id in use is checked and hashed once."""
        address = self._addresses.get(id) if type(id) is str else None
        if address is None:
            address = self.partition(journal_id(id)), id.encode()
            if len(self._addresses) >= ADDRESSES_MAX:
                self._addresses.clear()
            self._addresses[id] = address
        return address

    def addresses(self, ids: Sequence[str]) -> list[Address]:
        """The addresses of many, most of them known."""
        known = self._addresses.get
        try:
            return [known(id) or self.address(id) for id in ids]
        except TypeError:  # one that no dict could have: it is told by name
            return list(map(self.address, ids))

    def check_epoch(self) -> None:
        """Fenced where the topic has moved on to another epoch, as far as was learned in the last seconds.

        Who confirms meets the new epoch's mark. Who does not reads nothing, and would be told of success for ever.
        """
        if self._moved_to is not None:
            raise Fenced(
                f"topic {self._topic} has moved on from epoch {self.facts.epoch} to {self._moved_to}: "
                "open the book again"
            )
        self.due = False
        self._looking = asyncio.create_task(self._look())

    def _be_due(self) -> None:
        self.due = True

    async def _look(self) -> None:
        try:
            facts = await self._store.facts(self._topic)
        except TidebookError:
            facts = None  # appends go on without the store; it is asked again in a while
        if facts is not None and facts.epoch > self.facts.epoch:
            self._moved_to, self.due = facts.epoch, True
        else:
            self._timer = self.loop.call_later(LOOK_EVERY_S, self._be_due)

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        self._timer.cancel()
        for partition in self.partitions:
            await partition.cache.close()


async def open_topic(
    log: Log, store: StoreWriter, topic: str, facts: TopicFacts | None, settings: JournalSettings, metrics: Metrics
) -> OpenTopic:
    """Open a topic, made where it has no facts yet; a log that is not the one of the facts stops here, loudly."""
    if facts is None:
        state = await log.topic(topic)
        if state is None:
            state = await log.create_topic(topic, settings.partitions, limit_bytes=settings.limit_bytes)
        facts = await store.set_facts(topic, settings.facts(state.topic_id, state.partitions), expected=None)
    await check_topic(log, store, topic, facts)
    if not facts.admitted:
        facts = await _admit(log, store, topic, facts)
    await begin_epoch(store, topic, facts)
    return OpenTopic(log, store, topic, facts, settings, metrics)


async def _admit(log: Log, store: StoreWriter, topic: str, facts: TopicFacts) -> TopicFacts:
    """Raise the time of a new topic to the greatest one of the book before anything is appended to it.

    It is registered by now, and holds the horizon of tag queries back. One that did not see it registered has read
    its pointers before this does, so nothing appended from here on can lie below what it delivered.
    """
    pointers = [await store.pointers(each) for each in await store.topics()]
    most_ms = max((pointer.time_ms for of_topic in pointers for pointer in of_topic.values()), default=0)
    if most_ms:
        value = encode_record(Mark(facts.epoch, most_ms), limit_bytes=facts.limit_bytes)
        numbers = range(facts.partitions)
        await asyncio.gather(*(log.append(Outgoing(topic, number, None, value)) for number in numbers))
    return await store.set_facts(topic, msgspec.structs.replace(facts, admitted=True), expected=facts)


async def check_topic(log: Log, store: StoreWriter, topic: str, facts: TopicFacts) -> None:
    """Check that the log holds the very life of the topic that the facts speak of."""
    remedy = f"if the log is right, run 'tidebook journal adopt {topic}': it begins a new epoch on what the store has"
    state = await log.topic(topic)
    if state is None:
        raise Corrupt(f"topic {topic}: the store knows it and the log does not: restore the log, or {remedy}")
    if state.topic_id != facts.topic_id:
        raise Corrupt(
            f"topic {topic}: the log holds another life of it ({state.topic_id}) than the store was filled from "
            f"({facts.topic_id}): {remedy}"
        )
    if state.partitions < facts.partitions:
        raise Corrupt(f"topic {topic}: it was made with {facts.partitions} partitions and has {state.partitions} now")
    numbers = range(facts.partitions)
    pointers = await asyncio.gather(*(store.pointer(topic, number) for number in numbers))
    ends = await asyncio.gather(*(log.end(topic, number) for number in numbers))
    for number, pointer, end in zip(numbers, pointers, ends, strict=True):
        if pointer is not None and pointer.position.epoch == facts.epoch and end <= pointer.position.offset:
            raise Corrupt(
                f"topic {topic}, partition {number}: the log ends at {end}, but the store was replicated through "
                f"{pointer.position.offset}: {remedy}"
            )


async def adopt_topic(log: Log, store: StoreWriter, topic: str, settings: JournalSettings) -> TopicFacts:
    """Begin a new epoch on the log as it is: what the store has stays, records of older epochs count no more.

    Where log and facts fit together there is nothing to adopt: a new epoch would void what is not replicated yet.
    """
    facts = await store.facts(topic)
    state = await log.topic(topic)
    if state is None:
        partitions = facts.partitions if facts is not None else settings.partitions
        limit_bytes = facts.limit_bytes if facts is not None else settings.limit_bytes
        state = await log.create_topic(topic, partitions, limit_bytes=limit_bytes)
    if facts is None:
        return await store.set_facts(topic, settings.facts(state.topic_id, state.partitions), expected=None)
    if state.partitions < facts.partitions:
        raise Corrupt(f"topic {topic}: {facts.partitions} partitions are needed and the log has {state.partitions}")
    if not await _fits(log, store, topic, facts):
        facts = await _new_epoch(log, store, topic, facts, state.topic_id)
    await begin_epoch(store, topic, facts)
    return facts


async def _new_epoch(log: Log, store: StoreWriter, topic: str, facts: TopicFacts, topic_id: str) -> TopicFacts:
    """Set facts of a new epoch, or learn those that another has set meanwhile.

    A mark of the new epoch comes first: whoever still holds the old facts stops at it, and is told of no success.
    The facts name the marks of whoever set them. All records of the epoch lie behind those; before the mark of one who
    came second, there may be appends that were acknowledged.
    """
    # Its tick lies above all of the old epoch: offsets begin anew, and at the same time they would order tagged events.
    known = await store.pointers(topic)
    tick_ms = max((pointer.time_ms for pointer in known.values()), default=-1) + 1
    epoch = facts.epoch + 1
    value = encode_record(Mark(epoch, tick_ms), limit_bytes=facts.limit_bytes)
    numbers = range(facts.partitions)
    marks = await asyncio.gather(*(log.append(Outgoing(topic, number, None, value)) for number in numbers))
    began = tuple((mark.offset, max(mark.timestamp_ms, tick_ms)) for mark in marks)
    wanted = msgspec.structs.replace(facts, topic_id=topic_id, epoch=epoch, began=began)
    return await store.set_facts(topic, wanted, expected=facts)


async def _fits(log: Log, store: StoreWriter, topic: str, facts: TopicFacts) -> bool:
    try:
        await check_topic(log, store, topic, facts)
    except Corrupt:
        return False
    return True


async def begin_epoch(store: StoreWriter, topic: str, facts: TopicFacts) -> None:
    """Let the epoch begin at its marks: what lies before is void, and may be gone from the log already.

    Harmless to repeat, at any time and by anybody: whoever set the facts may have died before this.
    """
    if not facts.began:
        return
    known = await store.pointers(topic)
    for number, (offset, time_ms) in enumerate(facts.began):
        pointer = known.get(number)
        if pointer is not None:
            if pointer.position.epoch >= facts.epoch:
                continue
            time_ms = max(time_ms, pointer.time_ms + 1)
        begun = Pointer(Position(facts.epoch, offset), time_ms)
        try:
            await store.apply(SliceWrites(topic, number, pointer, begun, ()))
        except Fenced:
            pass  # another has begun it meanwhile
