"""Deciders turn commands and the state of an entity into events, which are appended unless another writer was first."""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from datetime import datetime
from hashlib import blake2b
from types import UnionType
from typing import Any, Final, Generic, Protocol, TypedDict, TypeVar, Union, get_args, get_origin, get_type_hints
from weakref import WeakValueDictionary

import msgspec

from tidebook.core import seq_nr as numbers
from tidebook.core.errors import Conflict, InvalidInput, OutcomeUnknown, TidebookError, Truncated, Unavailable
from tidebook.core.event import Event
from tidebook.core.head import Head
from tidebook.core.payload import JSON, EncodedJson
from tidebook.core.position import Position
from tidebook.core.seq_nr import LAST
from tidebook.domain.event_type import EventTypes
from tidebook.domain.typed_event import row_decoder
from tidebook.journal.journal import Journal
from tidebook.journal.outcome import Appended
from tidebook.runtime.backoff import Backoff
from tidebook.runtime.blocking_facade import BlockingFacade, blocking, forwarded
from tidebook.store.port import StoredSnapshot

LOGGER = logging.getLogger("tidebook.domain")

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)

CONFLICTS_MAX: Final = 20
UNKNOWN_MAX: Final = 3
RETRY_FIRST_S: Final = 0.002
RETRY_MAX_S: Final = 0.1
CACHED_MAX: Final = 10_000
#: How many recent command ids of an entity are known; they are in its events' metadata, its snapshots and the cache.
COMMANDS_MAX: Final = 128
#: How many times a load restarts if the journal is purged or truncated while it is read.
LOADS_MAX: Final = 10
#: How many events a replay passes to `evolve_all` at once.
REPLAY_PAGE: Final = 1_000
#: The metadata key that holds the command id of an event.
COMMAND_ID: Final = "command_id"

#: A separate generator, so that the application's seeded one is not affected.
_random = random.Random()


class HasInitial(Protocol[S_co]):
    """The type of a decider with an `initial` function, for type checkers."""

    def initial(self) -> S_co:
        """Return the state of an entity without events."""
        ...


class DeciderOptions(TypedDict, total=False):
    """The options of `Book.decider`, for type checkers."""

    events: Iterable[type[Any]] | None
    snapshot_every: int | None
    snapshot_version: int
    conflicts_max: int | None
    cached_max: int | None


class Done(msgspec.Struct, Generic[S], frozen=True):
    """The result of a command: the state after it, its events, and their place in the journal.

    `first` and `last` are None if the command produced no events, or was repeated and its events have been deleted.
    """

    state: S
    events: list[Any]
    topic: str
    id: str
    seq_nr: int
    first: int | None
    last: int | None
    partition: int | None
    offset: int | None
    #: Whether the command had been executed before, under the same command id.
    repeated: bool = False


class Loaded(msgspec.Struct, Generic[S], frozen=True):
    """The state of an entity as of `seq_nr`, 0 if there is no journal."""

    state: S
    seq_nr: int


class _Entity(msgspec.Struct, Generic[S], frozen=True):
    """The state of an entity, with the position and the recent command ids that the next command needs."""

    state: S
    seq_nr: int = 0
    #: None while there is no journal.
    incarnation: Position | None = None
    #: The first and last number of the events of the recent commands, by command id; the oldest first.
    commands: Mapping[str, tuple[int, int]] = {}


def _remember(
    commands: Mapping[str, tuple[int, int]], command_id: str, first: int, last: int
) -> dict[str, tuple[int, int]]:
    known = dict(commands)
    first = known[command_id][0] if command_id in known else first
    known[command_id] = (first, last)
    if len(known) > COMMANDS_MAX:
        del known[next(iter(known))]
    return known


class _Decision(msgspec.Struct, Generic[S], frozen=True):
    """The events of a command, as the application's objects and encoded for the log, and the state after them."""

    events: list[Any]
    encoded: list[Event]
    state: S


class Rules(Generic[S]):
    """The three functions of a decider, in any of the forms in which an application may write them.

    An object or a class with `initial()`, `decide(command, state)` and `evolve(state, event)`; or a class without
    `initial` whose instances are the state, with methods `decide(self, command)` and `evolve(self, event)`. In that
    form a command may also be a method of the class: `execute("a-1", Account.withdraw, 30)`.
    """

    def __init__(self, decider: Any, events: Iterable[type[Any]] | None = None) -> None:
        self.decider = decider
        self.name = getattr(decider, "__name__", type(decider).__name__)
        self._has_methods = isinstance(decider, type) and not hasattr(decider, "initial")
        if not callable(getattr(decider, "evolve", None)):
            raise InvalidInput(f"{self.name} is not a decider: it has no function evolve(state, event)")
        if not self._has_methods and not (callable(decider.initial) and callable(getattr(decider, "decide", None))):
            raise InvalidInput(
                f"{self.name} is not a decider: it needs initial(), decide(command, state) and evolve(...)"
            )
        self.types = EventTypes(_event_classes(decider, events, self.name))
        self.state_type = _state_type(decider, self._has_methods)

    def initial(self) -> S:
        """Return the state of an entity without events."""
        state: S = self.decider() if self._has_methods else self.decider.initial()
        return state

    def decide(self, state: S, command: Any, arguments: Sequence[Any] = ()) -> list[Any]:
        """Return the events of a command; any exception of the application refuses the command."""
        if not self._has_methods:
            if arguments:
                raise InvalidInput("arguments after the command need a command that is a method of the state's class")
            decided = self.decider.decide(command, state)
        elif inspect.isfunction(command):
            decided = command(state, *arguments)
        else:
            decided = state.decide(command)  # type: ignore[attr-defined]
        if decided is None:
            return []
        if type(decided) in self.types.classes:  # checked first: an event may be iterable, as pydantic models are
            return [decided]
        if isinstance(decided, Iterable) and not isinstance(decided, str | bytes | Mapping):
            return list(decided)
        return [decided]

    def evolve_all(self, state: S, events: Iterable[Any]) -> S:
        """Return the state after events. `evolve` works on a copy; a method may change its object and return None."""
        evolve = self.decider.evolve
        state = self.copy(state)
        for event in events:
            evolved = evolve(state, event)
            state = state if evolved is None and self._has_methods else evolved
        return state

    def copy(self, state: S) -> S:
        """Return a copy of a state that shares nothing mutable with it."""
        try:
            return deepcopy(state)
        except TypeError:
            if self._has_methods:
                raise
            return state  # for example a read-only view, which the functions of a decider cannot change anyway


def _event_classes(decider: Any, events: Iterable[type[Any]] | None, name: str) -> list[type[Any]]:
    """Return the classes of the events: those given, the attribute `events`, or the annotation of `evolve`."""
    given = events if events is not None else getattr(decider, "events", None)
    if given is not None:
        return list(given)
    try:
        hints = get_type_hints(decider.evolve)
    except Exception:  # an annotation that cannot be resolved at run time
        hints = {}
    hints.pop("return", None)
    last = list(hints.values())[-1] if hints else None
    classes: list[Any] = list(get_args(last)) if get_origin(last) in (Union, UnionType) else [last]
    if not classes or not all(isinstance(each, type) for each in classes):
        raise InvalidInput(f"the events of {name} are not known: give book.decider(..., events=[Opened, Deposited])")
    return classes


def _state_type(decider: Any, has_methods: bool) -> Any:
    """Return the type of the state, or None if it is not declared."""
    if has_methods:
        return decider
    if (declared := getattr(decider, "State", None)) is not None:
        return declared
    try:
        return get_type_hints(decider.initial).get("return")
    except Exception:  # an annotation that cannot be resolved at run time
        return None


class StateSnapshots(Generic[S]):
    """Encodes states as snapshots. Their schema is derived from the decider's name, the version and the state's class.

    A snapshot of another schema is ignored: the events are replayed instead.
    """

    def __init__(self, name: str, state_type: Any, version: int = 1) -> None:
        if state_type is None or state_type is Any:
            raise InvalidInput("snapshot_every needs the type of the state: set State on the decider")
        self._encode: Callable[[Any], bytes] = msgspec.json.Encoder().encode
        self._plain: Callable[[Any], Any] = msgspec.to_builtins
        try:
            if callable(getattr(state_type, "model_validate_json", None)):
                schema = state_type.model_json_schema()
                self._encode = lambda state: state.model_dump_json().encode()
                self._plain = state_type.model_dump
                self._decode: Callable[[bytes], Any] = state_type.model_validate_json
            else:
                schema = msgspec.json.schema(state_type)
                self._decode = msgspec.json.Decoder(state_type).decode
        except (TypeError, NameError, msgspec.MsgspecError) as error:
            raise InvalidInput(f"snapshots need a state that can be encoded as JSON: {error}") from error
        text = msgspec.json.encode([version, name, schema], order="sorted")
        self.schema = blake2b(text, digest_size=8).hexdigest()

    def encode(self, entity: _Entity[S]) -> EncodedJson:
        """Return the payload of a snapshot; raise InvalidInput for a state that could not be read back."""
        state = self._encode(entity.state)
        read = self._decode(state)
        # Classes without an `__eq__` are compared by their fields.
        if read != entity.state and self._plain(read) != self._plain(entity.state):
            raise InvalidInput(
                "the state would not be the same when read back: declare what it contains, "
                "such as dict[int, str] and not dict"
            )
        content = _SnapshotContent(self.schema, msgspec.Raw(state), dict(entity.commands))
        return EncodedJson(msgspec.json.encode(content))

    def decode(self, stored: StoredSnapshot, incarnation: Position) -> _Entity[S] | None:
        """Return the entity of a snapshot; None if it has another schema or is not one of a decider."""
        if stored.payload_type != JSON:
            return None
        try:
            content = _decode_content(stored.payload)
            if content.schema != self.schema:
                return None
            return _Entity(self._decode(bytes(content.state)), stored.seq_nr, incarnation, content.commands)
        except (msgspec.MsgspecError, ValueError):  # written by other code under the same names: replay instead
            return None


class _SnapshotContent(msgspec.Struct):
    schema: str
    state: msgspec.Raw
    commands: dict[str, tuple[int, int]] = {}


_decode_content = msgspec.json.Decoder(_SnapshotContent).decode


class Decider(Generic[S]):
    """Executes commands on the entities of one topic, each of which is a journal.

    >>> async def withdraw(book, Account, Withdraw):
    ...     accounts = book.decider("accounts", Account)
    ...     done = await accounts.execute("a-1", Withdraw(30))
    ...     return done.state, done.events
    """

    def __init__(
        self,
        journal: Journal,
        rules: Rules[S],
        *,
        snapshot_every: int | None = None,
        snapshot_version: int = 1,
        conflicts_max: int = CONFLICTS_MAX,
        cached_max: int = CACHED_MAX,
    ) -> None:
        if snapshot_every is not None and not (type(snapshot_every) is int and snapshot_every >= 1):
            raise InvalidInput(f"snapshot_every must be a whole number of at least 1, not {snapshot_every!r}")
        self.journal = journal
        self.rules = rules
        self._every = snapshot_every
        self._snapshots = (
            None if snapshot_every is None else StateSnapshots[S](rules.name, rules.state_type, snapshot_version)
        )
        self._conflicts_max = conflicts_max
        self._cached_max = cached_max
        self._cached: OrderedDict[str, _Entity[S]] = OrderedDict()
        #: This process runs one command of an entity at a time: concurrent ones would only conflict.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def topic(self) -> str:
        """The topic of the entities' journals."""
        return self.journal.topic

    async def execute(self, id: str, command: Any, *arguments: Any, command_id: str | None = None) -> Done[S]:
        """Run a command on the entity's state and append its events; return the new state and the events.

        `decide` is called again if another writer was first, so it must not have side effects; after `conflicts_max`
        retries, `Conflict` is raised. Errors of `decide` or `evolve` are raised here, and nothing is appended.
        `OutcomeUnknown` means that the events may have been appended, `Unavailable` that they were not.

        With `command_id`, a command that was executed before, among the last 128 of the entity, is not executed again:
        its result is returned, with the current state, and without events if those were deleted or purged since. A
        command that produced no events left no trace, and is run again.
        """
        if command_id is not None and (type(command_id) is not str or not command_id):
            raise InvalidInput(f"a command id must be a non-empty string, not {command_id!r}")
        lock = self._locks.get(id)
        if lock is None:
            lock = self._locks[id] = asyncio.Lock()
        async with lock:
            return await self._execute(id, lambda state: self.rules.decide(state, command, arguments), command_id)

    async def _execute(self, id: str, decide: Callable[[S], list[Any]], command_id: str | None) -> Done[S]:
        # Not cached while the command is in progress: if it is cancelled, the cached state could be outdated.
        entity = self._cached.pop(id, None)
        is_fresh = entity is None
        if entity is None:
            entity = await self._load(id)
        append_id: bytes | None = None
        if command_id is not None:  # the same command id on two entities identifies two appends
            append_id = blake2b(msgspec.json.encode([self.topic, id, command_id]), digest_size=16).digest()
        backoff = Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S)
        conflicts = 0
        while True:
            if command_id is not None and (known := entity.commands.get(command_id)) is not None:
                self._remember(id, entity)
                return await self._repeated(id, entity, command_id, *known)
            try:
                decided = self._evolved(entity.state, decide(entity.state), command_id)
            except Exception:
                self._remember(id, entity)
                if is_fresh:
                    raise
                loaded = await self._load(id, entity)
                if loaded is entity:
                    raise
                self._cached.pop(id, None)
                entity, is_fresh = loaded, True  # the refused state was outdated
                continue
            if not decided.events:
                if not is_fresh:
                    entity, is_fresh = await self._load(id, entity), True
                    continue
                self._remember(id, entity)
                return Done(decided.state, [], self.topic, id, entity.seq_nr, None, None, None, None)
            try:
                appended = await self._append(id, entity, decided.encoded, append_id)
            except Conflict:
                conflicts += 1
                if conflicts > self._conflicts_max:
                    raise
                await asyncio.sleep(_random.uniform(0, backoff.next_s()))
                entity, is_fresh = await self._load(id, entity), True
                continue
            try:
                if appended.repeated and command_id is not None:
                    assert appended.first is not None
                    assert appended.last is not None
                    return await self._repeated(id, entity, command_id, appended.first, appended.last)
                return await self._done(id, entity, decided, appended, command_id)
            except Unavailable as error:
                raise OutcomeUnknown(
                    f"{self.topic}/{id}: the events were appended, but the result could not be read: {error}",
                    partition=appended.partition, offset=appended.offset,
                ) from error  # fmt: skip

    def _evolved(self, state: S, decided: Sequence[Any], command_id: str | None) -> _Decision[S]:
        """Return the state after the events, before their append: `evolve` must accept them, or every load fails."""
        encoded = self.rules.types.encode_all(decided)
        if command_id is not None:
            for event in encoded:
                event.metadata = {**(event.metadata or {}), COMMAND_ID: command_id}
        events = [event.payload if isinstance(event, Event) else event for event in decided]
        return _Decision(events, encoded, self.rules.evolve_all(state, events))

    async def _append(self, id: str, entity: _Entity[S], events: Sequence[Event], append_id: bytes | None) -> Appended:
        """Append the events after the entity's state; an unknown outcome is retried, which never appends twice."""
        expected, incarnation = entity.seq_nr, entity.incarnation
        unknown: OutcomeUnknown | None = None
        for _ in range(UNKNOWN_MAX):
            try:
                if unknown is None:
                    return await self.journal.append(
                        id, events, expected=expected, incarnation=incarnation, append_id=append_id
                    )
                return await self.journal.append(id, events, expected=expected, incarnation=incarnation, retry=unknown)
            except OutcomeUnknown as error:
                if error.append_id is None:
                    raise
                unknown = error
            except Unavailable as error:
                if unknown is None:
                    raise
                raise unknown from error  # an earlier attempt may have been written
        assert unknown is not None
        raise unknown

    async def _done(
        self, id: str, entity: _Entity[S], decided: _Decision[S], appended: Appended, command_id: str | None
    ) -> Done[S]:
        first, last = appended.first, appended.last
        assert first is not None
        assert last is not None
        incarnation = entity.incarnation
        if incarnation is None:
            incarnation = Position((await self.journal.topic_config()).epoch, appended.offset)
        commands = entity.commands if command_id is None else _remember(entity.commands, command_id, first, last)
        # The cached state is a copy, because the caller may modify what it receives.
        after = _Entity(self.rules.copy(decided.state), last, incarnation, commands)
        self._remember(id, after)
        if self._every is not None and last // self._every > (first - 1) // self._every:
            await self._save(id, after)
        events, partition, offset = decided.events, appended.partition, appended.offset
        return Done(decided.state, events, self.topic, id, last, first, last, partition, offset)

    def _remember(self, id: str, entity: _Entity[S]) -> None:
        self._cached[id] = entity
        if len(self._cached) > self._cached_max:
            self._cached.popitem(last=False)

    async def _save(self, id: str, entity: _Entity[S]) -> None:
        """Save a snapshot; one that fails costs only time at the next load."""
        assert self._snapshots is not None
        try:
            payload = self._snapshots.encode(entity)
            await self.journal.save_snapshot(id, seq_nr=entity.seq_nr, payload=payload, incarnation=entity.incarnation)
        except (TidebookError, TypeError, ValueError, msgspec.MsgspecError) as error:
            LOGGER.warning("%s/%s: the snapshot at %d was not saved: %s", self.topic, id, entity.seq_nr, error)

    async def load(self, id: str, *, at: int | datetime | None = None) -> Loaded[S]:
        """Return the state of an entity now, after event number `at`, or as of the time `at`."""
        if at is None:
            entity = await self._load(id, self._cached.get(id))
            if id not in self._locks:  # otherwise a command in progress caches a newer state
                self._remember(id, entity)
            return Loaded(self.rules.copy(entity.state), entity.seq_nr)
        if isinstance(at, datetime):
            if at.tzinfo is None:
                raise InvalidInput("a time needs a time zone, for example datetime.now(UTC)")
            entity = await self._load(id, None, until_ms=int(at.timestamp() * 1000))
        else:
            if numbers.seq_nr(at, name="at", least=0) == 0:
                return Loaded(self.rules.initial(), 0)
            entity = await self._load(id, None, to=at)
        return Loaded(entity.state, entity.seq_nr)

    async def _load(
        self, id: str, known: _Entity[S] | None = None, *, to: int = LAST, until_ms: int | None = None
    ) -> _Entity[S]:
        """Return the entity as of a moment after this call; `known` itself if nothing was written since."""
        for _ in range(LOADS_MAX):
            head = await self.journal.head(id)
            if head is None:
                return known if known is not None and known.incarnation is None else _Entity(self.rules.initial())
            try:
                if known is not None and known.incarnation == head.incarnation:
                    if known.seq_nr == head.seq_nr:
                        return known
                    if known.seq_nr < head.seq_nr and head.delete_to <= known.seq_nr:
                        return await self._replay(id, known, head.seq_nr)
                for base in await self._bases(id, head, to):
                    if until_ms is None or await self._is_before(id, base, head, until_ms):
                        return await self._replay(id, base, min(to, head.seq_nr), until_ms)
            except Truncated:
                continue  # purged or deleted during the read: the new head decides
            raise Truncated(
                f"{self.topic}/{id}: the events up to {head.delete_to} are deleted and no snapshot has their state: "
                "the state cannot be computed; purge the journal, or save a snapshot before deleting"
            )
        raise Truncated(f"{self.topic}/{id}: the journal changes faster than it can be read: try again")

    async def _bases(self, id: str, head: Head, to: int) -> list[_Entity[S]]:
        """Return the states that a replay may start from, the latest first: snapshots, and the initial state."""
        bases: list[_Entity[S]] = []
        if self._snapshots is not None:
            for stored in await self.journal.snapshots(id, head):
                if head.delete_to <= stored.seq_nr <= min(to, head.seq_nr):
                    entity = self._snapshots.decode(stored, head.incarnation)
                    if entity is not None:
                        bases.append(entity)
        if head.delete_to == 0:
            bases.append(_Entity(self.rules.initial(), 0, head.incarnation))
        return bases

    async def _is_before(self, id: str, base: _Entity[S], head: Head, until_ms: int) -> bool:
        """Return whether the last event of a base was appended at or before a time."""
        if base.seq_nr == 0:
            return True
        decode = row_decoder(None, self.topic, id)
        async for event in self.journal.read_decoded(
            id, decode, start=base.seq_nr, end=base.seq_nr, barrier="offset", incarnation=head.incarnation
        ):
            return event.timestamp_ms <= until_ms
        return False

    async def _replay(self, id: str, base: _Entity[S], to: int, until_ms: int | None = None) -> _Entity[S]:
        """Return the base with the events after it applied, up to number `to`."""
        if to <= base.seq_nr:
            return base
        state, seq_nr, commands = base.state, base.seq_nr, base.commands
        page: list[Any] = []
        decode = row_decoder(self.rules.types, self.topic, id)
        # The head was read after a barrier, and only its events are needed: the end of the log suffices as barrier.
        async for event in self.journal.read_decoded(
            id, decode, start=seq_nr + 1, end=to, barrier="offset", incarnation=base.incarnation
        ):
            if until_ms is not None and event.timestamp_ms > until_ms:
                break
            page.append(event.data)
            if len(page) == REPLAY_PAGE:
                state, page = self.rules.evolve_all(state, page), []
            seq_nr = event.seq_nr
            metadata = event.metadata
            if metadata is not None and isinstance(command_id := metadata.get(COMMAND_ID), str):
                commands = _remember(commands, command_id, seq_nr, seq_nr)
        return _Entity(self.rules.evolve_all(state, page), seq_nr, base.incarnation, commands)

    async def _repeated(self, id: str, known: _Entity[S], command_id: str, first: int, last: int) -> Done[S]:
        """Return the result of a command that was executed before, as far as the journal still has it."""
        decode = row_decoder(self.rules.types, self.topic, id)
        events, partition, offset = list[Any](), None, None
        async for event in self.journal.read_decoded(id, decode, start=first, end=last):
            # After a purge, other events have the same numbers.
            if event.metadata is not None and event.metadata.get(COMMAND_ID) == command_id:
                events.append(event.data)
                partition, offset = event.partition, event.offset
        try:
            entity = await self._load(id, None, to=last if events else LAST)
        except Truncated:  # earlier events are deleted, and no snapshot is old enough
            entity = await self._load(id, known)
        return Done(
            self.rules.copy(entity.state), events, self.topic, id, entity.seq_nr, first if events else None,
            last if events else None, partition, offset, repeated=True,
        )  # fmt: skip


class SyncDecider(BlockingFacade[Decider[Any]]):
    """The blocking form of `Decider`."""

    topic = forwarded(Decider[Any].topic)
    execute = blocking(Decider.execute)
    load = blocking(Decider.load)
