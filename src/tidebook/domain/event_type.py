"""Events as classes: the name and version of each type, its codec, and the upcasters of its earlier versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, TypeVar, overload
from weakref import WeakKeyDictionary

import msgspec

from tidebook.core.errors import Corrupt, InvalidInput, UnknownEventType, UnreadableEvent
from tidebook.core.event import TYPE_VERSION_MAX, EncodedEvent, Event, check_type
from tidebook.core.payload import JSON, EncodedJson, decode_payload

T = TypeVar("T")

#: Turns the raw value of one version into that of the next: JSON values in, JSON values out.
Upcaster = Callable[[Any], Any]

_encode_json = msgspec.json.Encoder().encode
_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class EventType(msgspec.Struct, frozen=True):
    """The name under which events of a class are stored, the current version, and the upcasters from older versions."""

    name: str
    version: int = 1
    #: The oldest version that can be in a journal.
    oldest: int = 1
    upcasters: Mapping[int, Upcaster] = {}


_declared: WeakKeyDictionary[type, EventType] = WeakKeyDictionary()


@overload
def event_type(name: type[T]) -> type[T]: ...
@overload
def event_type(
    name: str | None = None, *, version: int = 1, oldest: int = 1, upcasters: Mapping[int, Upcaster] | None = None
) -> Callable[[type[T]], type[T]]: ...
def event_type(
    name: str | type[Any] | None = None,
    *,
    version: int = 1,
    oldest: int = 1,
    upcasters: Mapping[int, Upcaster] | None = None,
) -> Any:
    """Declare a dataclass, a msgspec Struct or a pydantic model as an event, by default under the name of the class.

    `upcasters` has a function for each version from `oldest` up to the one before `version`: it takes the raw value of
    that version and returns the raw value of the next.

    >>> @event_type("deposited", version=2, upcasters={1: lambda value: value | {"currency": "EUR"}})
    ... class Deposited(msgspec.Struct):
    ...     amount: int
    ...     currency: str
    """
    if isinstance(name, type):
        return _declare(name, EventType(name.__name__))

    def declare(class_: type[T]) -> type[T]:
        return _declare(class_, EventType(name or class_.__name__, version, oldest, dict(upcasters or {})))

    return declare


def _declare(class_: type[T], declared: EventType) -> type[T]:
    check_type(declared.name, declared.version)
    _check_upcasters(declared)
    _declared[class_] = declared
    return class_


def _check_upcasters(declared: EventType) -> None:
    """Raise InvalidInput if an upcaster is superfluous, or missing: events of its version could not be read."""
    if not 1 <= declared.oldest <= declared.version <= TYPE_VERSION_MAX:
        raise InvalidInput(f"event type {declared.name!r}: oldest must be a version from 1 to {declared.version}")
    needed = set(range(declared.oldest, declared.version))
    if missing := sorted(needed - set(declared.upcasters)):
        raise InvalidInput(
            f"event type {declared.name!r}: version {declared.version} needs an upcaster from version "
            f"{', '.join(map(str, missing))}: add it, or set oldest if no journal has such events"
        )
    if surplus := sorted(set(declared.upcasters) - needed):
        raise InvalidInput(
            f"event type {declared.name!r}: there is no step from version {surplus[0]} between version "
            f"{declared.oldest} and version {declared.version}: raise version, or remove the upcaster"
        )


def declared_type(class_: type) -> EventType:
    """Return the declaration of a class by `event_type`; without one, its own name in version 1."""
    return _declared.get(class_) or EventType(class_.__name__)


def declared_types() -> EventTypes | None:
    """Return all types that were declared by `event_type` under a name that no other class has; lenient for others."""
    by_name: dict[str, list[type]] = {}
    for class_, declared in list(_declared.items()):
        by_name.setdefault(declared.name, []).append(class_)
    unique = [classes[0] for classes in by_name.values() if len(classes) == 1]
    return EventTypes(unique, lenient=True) if unique else None


class _Codec:
    """Encodes and decodes the objects of one class as JSON."""

    def __init__(self, class_: type) -> None:
        self.class_ = class_
        declared = declared_type(class_)
        self.name, self.version, self.oldest = declared.name, declared.version, declared.oldest
        self.upcasters = declared.upcasters
        self.encode: Callable[[Any], bytes]
        self.decode: Callable[[bytes], Any]
        if callable(getattr(class_, "model_validate_json", None)):  # pydantic, which is not imported here
            self.encode = _dump_model
            self.decode = class_.model_validate_json  # type: ignore[attr-defined]
            return
        if not is_dataclass(class_) and not issubclass(class_, msgspec.Struct):
            raise InvalidInput(
                f"{class_.__qualname__} is not an event class: use a dataclass, a msgspec Struct or a pydantic model"
            )
        try:
            msgspec.json.schema(class_)  # a decoder would accept fields that it cannot decode
            self.decode = msgspec.json.Decoder(class_).decode
        except (TypeError, NameError) as error:
            raise InvalidInput(f"{class_.__qualname__} cannot be an event: {error}") from error
        self.encode = _encode_json

    def upcast(self, version: int, data: bytes) -> Any:
        """Decode the bytes of an earlier version."""
        value = decode_payload(JSON, data)
        for each in range(version, self.version):
            value = self.upcasters[each](value)
        return self.decode(_encode_json(value))


def _dump_model(model: Any) -> bytes:
    text: str = model.model_dump_json(warnings=False)  # `encode` checks what pydantic would warn about
    return text.encode()


class EventTypes:
    """The types of the events of a topic: encodes objects of their classes, and decodes by name and version.

    With `lenient`, an event of a type or a version that is not declared is returned as its raw value.
    """

    def __init__(self, events: Iterable[type], *, lenient: bool = False) -> None:
        self.lenient = lenient
        self._by_class: dict[type, _Codec] = {}
        self._by_name: dict[str, _Codec] = {}
        #: The decoders of the current versions, which nearly all events have.
        self._current: dict[tuple[str | None, int], Callable[[bytes], Any]] = {}
        for class_ in events:
            if not isinstance(class_, type):
                raise InvalidInput(f"events must be a list of classes, not of {type(class_).__name__}")
            codec = _Codec(class_)
            if (other := self._by_name.get(codec.name)) is not None and other.class_ is not class_:
                raise InvalidInput(
                    f"{class_.__qualname__} and {other.class_.__qualname__} both have the event type {codec.name!r}"
                )
            self._by_class[class_] = self._by_name[codec.name] = codec
            self._current[codec.name, codec.version] = codec.decode
        if not self._by_class:
            raise InvalidInput("events must be a list of at least one class")

    @property
    def classes(self) -> tuple[type, ...]:
        """The classes of the events."""
        return tuple(self._by_class)

    def encode(self, event: Any) -> Event:
        """Return a typed event for the log: an object of one of the classes, or an `Event` that wraps one.

        Raise InvalidInput for any other object, and for one that could not be read back.
        """
        tags: Iterable[str] = ()
        metadata: Mapping[str, Any] | None = None
        if isinstance(event, Event):
            event, tags, metadata = event.payload, event.tags, event.metadata
        codec = self._by_class.get(type(event))
        if codec is None:
            names = ", ".join(each.__name__ for each in self._by_class)
            raise InvalidInput(f"{type(event).__name__} is not among the events of this topic: they are {names}")
        try:
            data = codec.encode(event)
            codec.decode(data)  # an object may hold a value of another type than its class declares
        except (*_DECODE_ERRORS, TypeError, ValueError, OverflowError) as error:
            raise InvalidInput(f"the {codec.name} event could not be read back: {error}") from error
        return Event(EncodedJson(data), tags=tags, metadata=metadata, type=codec.name, version=codec.version)

    def encode_all(self, events: Sequence[object]) -> list[Event]:
        """Encode several events, as `encode` does."""
        if isinstance(events, str | bytes) or not isinstance(events, Sequence):
            raise InvalidInput("events must be a list of objects of the declared classes")
        return [self.encode(event) for event in events]

    def decode(self, event: EncodedEvent, topic: str, id: str, seq_nr: int) -> Any:
        """Return the object of an encoded event; raise UnknownEventType or UnreadableEvent, which name the event."""
        decode = self._current.get((event.type, event.version))
        try:
            if decode is not None and event.payload_type == JSON:
                return decode(event.payload)
            return self._decode_other(event, topic, id, seq_nr)
        except (UnreadableEvent, Corrupt):
            raise
        except Exception as error:  # an upcaster or a validator of the application may raise anything
            raise UnreadableEvent(
                topic=topic, id=id, seq_nr=seq_nr, type=event.type, version=event.version, reason=str(error)
            ) from error

    def _decode_other(self, event: EncodedEvent, topic: str, id: str, seq_nr: int) -> Any:
        codec = None if event.type is None else self._by_name.get(event.type)
        if codec is not None and event.payload_type == JSON and codec.oldest <= event.version < codec.version:
            return codec.upcast(event.version, event.payload)
        if self.lenient:
            return decode_payload(event.payload_type, event.payload)
        raise UnknownEventType(
            topic=topic, id=id, seq_nr=seq_nr, type=event.type, version=event.version,
            known=None if codec is None else codec.version,
        )  # fmt: skip
