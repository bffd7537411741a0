"""Process managers: from an event to commands, queue entries and outbox messages, each exactly once.

The effects of an event are decided first and then performed. Commands have ids that are derived from the event; queue
entries move the queue's own marks; outbox messages are published in the transaction that moves the process's offset.
So a batch that is repeated after a crash repeats no effect.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from tidebook.core.errors import InvalidInput, Unavailable
from tidebook.domain.decider import COMMANDS_MAX, Decider
from tidebook.domain.event_source import (
    BEGINNING,
    At,
    SourcePosition,
    SourceRow,
    decode_position,
    encode_position,
    slice_of,
)
from tidebook.domain.projection import Projection
from tidebook.domain.projection_runner import SliceRunner
from tidebook.domain.sql_engine import Handler, HandlerFailed, is_transient, raise_handler_failed
from tidebook.domain.topic_scan import in_scan, topic_place
from tidebook.domain.typed_event import TypedEvent
from tidebook.queue.entry import Date, Entry
from tidebook.queue.port import ENTRIES_MAX, Step
from tidebook.queue.priority import DEFAULT
from tidebook.queue.queue import Queue

#: The durations below and above which batches grow or shrink; a command takes longer than a projection's handler.
SHORT_S: Final = 0.5
LONG_S: Final = 2.0
#: How many times marks are read again because another process has moved them.
MARKS_MAX: Final = 20
#: How many commands an entity receives before the offset is stored: it must remember them all when they are repeated.
ENTITY_COMMANDS_MAX: Final = COMMANDS_MAX // 2

QueueOf = Callable[[str], Queue]
#: Publishes a message within a transaction of the outbox's database.
Publish = Callable[..., Any]


#: The topic and the id of an entity.
_EntityKey = tuple[str, str]


class _Command(msgspec.Struct, frozen=True):
    decider: Decider[Any]
    id: str
    command: Any
    command_id: str
    refusals: tuple[type[Exception], ...]


class Effects:
    """The effects of an event: the handler of a process calls these methods, and nothing happens before it returns."""

    def __init__(self, process: str, event: TypedEvent[Any], epoch: int) -> None:
        # The position separates the incarnations of a purged journal. The time separates those of a topic that was
        # deleted and created again, whose epochs and offsets begin again.
        place = f"{event.seq_nr}/{epoch}/{event.offset}/{event.timestamp_ms}"
        self._event_id = f"{process}/{event.topic}/{event.id}/{place}"
        self.commands: list[_Command] = []
        self.entities: Counter[_EntityKey] = Counter()
        self.entries: list[tuple[str, Entry]] = []
        self.messages: list[Mapping[str, Any]] = []

    def execute(
        self, decider: Decider[Any], id: str, command: Any, *, refusals: tuple[type[Exception], ...] = ()
    ) -> None:
        """Execute a command of a decider; errors in `refusals` are treated as its result and not retried.

        An event may cause up to 64 commands of one entity.
        """
        entity = (decider.topic, id)
        if self.entities[entity] == ENTITY_COMMANDS_MAX:
            raise InvalidInput(
                f"an event may cause up to {ENTITY_COMMANDS_MAX} commands of one entity, and this one causes more of "
                f"{decider.topic}/{id}: make them one command"
            )
        self.entities[entity] += 1
        command_id = f"{self._event_id}/{len(self.commands)}"
        self.commands.append(_Command(decider, id, command, command_id, refusals))

    def put(
        self,
        queue: str,
        data: Any,
        *,
        key: str | None = None,
        priority: int = DEFAULT,
        process_at: Date = None,
        expires_at: Date = None,
    ) -> None:
        """Put an entry into a queue; with `process_at` it is a timeout that is due at that time."""
        entry = Entry(data=data, key=key, priority=priority, process_at=process_at, expires_at=expires_at)
        self.entries.append((queue, entry))

    def publish(self, **fields: Any) -> None:
        """Publish an outbox message; the fields are those of `tidebook.outbox.publish`."""
        self.messages.append(fields)


class ProcessRunner(SliceRunner):
    """Runs the slices of a process: a batch's effects first, then the offset."""

    _short_s = SHORT_S
    _long_s = LONG_S

    def __init__(self, *args: Any, name: str, queue_of: QueueOf, publish: Publish, **options: Any) -> None:
        super().__init__(*args, **options)
        self._name = name
        self._queue_of = queue_of
        self._publish_message = publish

    async def _commit(
        self, slices: Sequence[int], before: str, after: str, calls: Sequence[tuple[Handler, Any]]
    ) -> None:
        if calls:
            # Another member may have taken the batch over, and then its effects would only be repeated: check first.
            build, member, check = self._build.number, self._member, self._tables.check_owner
            await self._engine.run(lambda connection: check(connection, build, member, slices, before))
        decided = [(event, await self._decide(handler, event)) for handler, event in calls]
        *first, last = _portions(decided)
        # If a later portion fails, the batch is fenced by the offset of an earlier one, and is read again from there.
        for portion in first:
            middle = encode_position(SourcePosition(portion[-1][0].at, decode_position(before).log))
            await self._perform(slices, before, middle, portion)
            before = middle
        await self._perform(slices, before, after, last)

    async def _perform(self, slices: Sequence[int], before: str, after: str, decided: Sequence[_Decided]) -> None:
        by_slice: dict[int, list[_Decided]] = {}
        for placed, effects in decided:
            number = slice_of(placed.event.topic, placed.event.id, self._settings.slices)
            by_slice.setdefault(number, []).append((placed, effects))
        await self._renewing(self._cause(by_slice))
        publishing = [
            (self._publish_in, _Publication(placed.event, message))
            for placed, effects in decided
            for message in effects.messages
        ]
        await super()._commit(slices, before, after, publishing)

    async def _cause(self, by_slice: Mapping[int, Sequence[_Decided]]) -> None:
        # The order of each journal is kept; journals of different slices do not wait for one another. A failure is
        # raised only after all have ended: an entity could have forgotten the id of a command that is executed late.
        results = await asyncio.gather(
            *(self._execute_all(of_slice) for of_slice in by_slice.values()), return_exceptions=True
        )
        for result in results:
            if result is not None:
                raise result
        await self._put_all(by_slice)

    async def _renewing(self, causing: Coroutine[Any, Any, None]) -> None:
        """Cause effects, and renew the lease meanwhile: otherwise a batch that takes longer would never be finished."""
        task = asyncio.ensure_future(causing)
        build, member, lease_s = self._build.number, self._member, self._settings.lease_s
        try:
            while not (await asyncio.wait([task], timeout=self._renew_every_s))[0]:
                try:
                    await self._engine.run(lambda connection: self._tables.renew(connection, build, member, lease_s))
                except Exception as error:
                    if not is_transient(error):
                        raise
        finally:
            task.cancel()
            await asyncio.wait([task])
        task.result()

    async def _decide(self, handler: Handler, placed: _Placed) -> Effects:
        effects = Effects(self._name, placed.event, placed.epoch)
        try:
            result = handler(effects, placed.event)
            if result is not None and inspect.isawaitable(result):
                await result
        except (Exception, asyncio.CancelledError) as error:
            raise_handler_failed(placed.event, error)
        return effects

    async def _execute_all(self, decided: Sequence[_Decided]) -> None:
        for placed, effects in decided:
            for each in effects.commands:
                try:
                    await each.decider.execute(each.id, each.command, command_id=each.command_id)
                except each.refusals:
                    continue
                except Exception as error:
                    raise HandlerFailed(placed.event) from error

    async def _put_all(self, by_slice: Mapping[int, Sequence[_Decided]]) -> None:
        names = {name for of_slice in by_slice.values() for _, effects in of_slice for name, _ in effects.entries}
        for name in sorted(names):
            queue, source = self._queue_of(name), f"process/{self._name}"
            for _ in range(MARKS_MAX):
                marks = await queue.marks(source)
                steps, entries = [], list[Entry]()
                for number, of_slice in by_slice.items():
                    text = marks.get(number)
                    mark = _Mark.decode(text)
                    new = [(placed, effects) for placed, effects in of_slice if not mark.covers(placed)]
                    found = [each for _, effects in new for target, each in effects.entries if target == name]
                    if found:
                        steps.append(Step(number, text, mark.moved_to(new[-1][0]).encode()))
                        entries += found
                if not entries or await queue.put_once(entries, source=source, steps=steps) is not None:
                    break
            else:
                raise Unavailable(f"queue {name!r}: other processes keep moving its marks for process {self._name!r}")

    def _publish_in(self, tx: Any, publication: _Publication) -> None:
        self._publish_message(tx.connection, **publication.fields)


class _OfEvent(msgspec.Struct, frozen=True):
    """The base of objects that belong to one event; errors name the event by the same attributes."""

    event: TypedEvent[Any]

    @property
    def topic(self) -> str:
        return self.event.topic

    @property
    def id(self) -> str:
        return self.event.id

    @property
    def seq_nr(self) -> int:
        return self.event.seq_nr


class _Placed(_OfEvent, frozen=True):
    """An event with its position in the stream."""

    at: At
    #: Its position outside a scan: the same event may be read by a scan after it was read from the log.
    outside_scan: At
    epoch: int


class _Mark(msgspec.Struct, frozen=True, array_like=True):
    """The progress of putting the entries of a slice into a queue."""

    at: At = BEGINNING
    #: Within a scan, the mark at which the scan began, which may be after the offset that the scan began from.
    before_scan: At = BEGINNING

    @classmethod
    def decode(cls, text: str | None) -> _Mark:
        value = [] if text is None else msgspec.json.decode(text)
        # A mark outside a scan consists only of its position.
        return msgspec.convert(value, cls) if value and isinstance(value[0], list) else cls(tuple(value))

    def encode(self) -> str:
        return msgspec.json.encode(self if in_scan(self.at) else self.at).decode()

    def covers(self, placed: _Placed) -> bool:
        """Return whether the entries of an event were put."""
        if in_scan(self.at):
            return placed.at <= self.at or placed.outside_scan <= self.before_scan
        return placed.outside_scan <= self.at

    def moved_to(self, placed: _Placed) -> _Mark:
        if not in_scan(placed.at):
            return _Mark(placed.at)
        return _Mark(placed.at, self.before_scan if in_scan(self.at) else self.at)


_Decided = tuple[_Placed, Effects]


def _portions(decided: Sequence[_Decided]) -> list[list[_Decided]]:
    """Return the events in portions, at least one.

    In a portion, no entity gets more commands than it remembers, and no queue more entries than one call may put.
    """
    portions: list[list[_Decided]] = [[]]
    commands: Counter[_EntityKey] = Counter()
    entries: Counter[str] = Counter()
    for each in decided:
        effects = each[1]
        puts = Counter(name for name, _ in effects.entries)
        if _exceeds(commands, effects.entities, ENTITY_COMMANDS_MAX) or _exceeds(entries, puts, ENTRIES_MAX):
            portions.append([])
            commands.clear()
            entries.clear()
        commands.update(effects.entities)
        entries.update(puts)
        portions[-1].append(each)
    return [each for each in portions if each] or [[]]


def _exceeds(counts: Counter[Any], more: Counter[Any], limit: int) -> bool:
    return any(counts[key] + count > limit for key, count in more.items())


class _Publication(_OfEvent, frozen=True):
    """A message to publish in the transaction of the offset, for an event."""

    fields: Mapping[str, Any]


class ProcessManager(Projection):
    """A process manager: its handler takes `(effects, event)` and declares the effects of the event.

    >>> def declare(book, mail_later):
    ...     @book.process("reminders", topics=["orders"])
    ...     def reminders(effects, event):
    ...         effects.put("mail", {"order": event.id}, process_at=mail_later)
    ...     return reminders
    """

    def __init__(self, *args: Any, queue_of: QueueOf, publish: Publish, **options: Any) -> None:
        super().__init__(*args, **options)
        self._make_runner = partial(ProcessRunner, name=self.name, queue_of=queue_of, publish=publish)

    def _prepare(self, row: SourceRow) -> Any:
        found = super()._prepare(row)
        if found is None:
            return None
        outside_scan = topic_place(row.topic, row.id, row.row) if in_scan(row.at) else row.at
        return found[0], _Placed(found[1], row.at, outside_scan, row.row.position.epoch)

    def dispose(self) -> None:
        """Close the connections of an engine that the book made for the process."""
        self._engine.dispose()

    async def rebuild(self) -> int:
        """Raise InvalidInput: the effects of a process cannot be repeated."""
        raise InvalidInput(f"process {self.name!r} cannot be rebuilt: its effects have already happened")
