"""Typed events: codecs, names and versions, upcasters, unknown types."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pydantic
import pytest

import tidebook
from tidebook.core.errors import InvalidInput, UnknownEventType, UnreadableEvent
from tidebook.core.event import Event, decode_event, encode_event
from tidebook.domain.event_type import EventTypes, declared_type


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Line:
    article: str
    price: Decimal


@dataclass
class OrderedAsDataclass:
    id: UUID
    at: datetime
    day: date
    within: timedelta
    color: Color
    lines: list[Line]
    counts: dict[int, float]
    note: str | None = None
    tags: frozenset[str] = field(default_factory=frozenset)


class OrderedAsStruct(msgspec.Struct):
    id: UUID
    at: datetime
    lines: tuple[Line, ...]
    color: Color = Color.RED


class LineModel(pydantic.BaseModel):
    article: str
    price: Decimal


class OrderedAsModel(pydantic.BaseModel):
    id: UUID
    at: datetime
    color: Color
    lines: list[LineModel]


ID, AT = UUID(int=5), datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
OBJECTS: list[Any] = [
    OrderedAsDataclass(
        ID, AT, date(2026, 1, 2), timedelta(seconds=1.5), Color.BLUE, [Line("a", Decimal("1.10"))], {1: 0.5},
        tags=frozenset({"x"}),
    ),
    OrderedAsStruct(ID, AT, (Line("a", Decimal("0.30")), Line("b", Decimal("1E+3")))),
    OrderedAsModel(id=ID, at=AT, color=Color.RED, lines=[LineModel(article="a", price=Decimal("1.10"))]),
]  # fmt: skip


def stored(types: EventTypes, event: object, **changes: Any) -> Any:
    encoded = decode_event(encode_event(types.encode(event)))
    return types.decode(msgspec.structs.replace(encoded, **changes), "orders", "o-1", 7)


@pytest.mark.parametrize("event", OBJECTS, ids=lambda each: type(each).__name__)
def test_an_object_comes_back_as_it_went_in(event: Any) -> None:
    assert stored(EventTypes([type(each) for each in OBJECTS]), event) == event


def test_the_default_name_is_that_of_the_class_in_version_1() -> None:
    assert (declared_type(Line).name, declared_type(Line).version) == ("Line", 1)


def test_a_bare_decorator_declares_the_name_of_the_class() -> None:
    @tidebook.event_type
    @dataclass
    class Paid:
        amount: int

    assert EventTypes([Paid]).encode(Paid(1)).type == "Paid"


def test_tags_and_metadata_stay_with_a_wrapped_object() -> None:
    event = EventTypes([Line]).encode(Event(Line("a", Decimal(1)), tags={"paid"}, metadata={"by": "x"}))
    assert (event.tags, event.metadata, event.type) == (frozenset({"paid"}), {"by": "x"}, "Line")


def test_an_object_of_another_class_is_refused() -> None:
    with pytest.raises(InvalidInput, match="Line is not among"):
        EventTypes([OrderedAsStruct]).encode(Line("a", Decimal(1)))


class Amount(msgspec.Struct):
    amount: float


@pytest.mark.parametrize("value", ["5", None, float("nan"), object(), {1}], ids=lambda value: type(value).__name__)
def test_an_object_that_could_not_be_read_back_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInput, match="read back"):
        EventTypes([Amount]).encode(Amount(value))


@pytest.mark.parametrize("class_", [int, dict, Path, type("Plain", (), {})], ids=repr)
def test_a_class_that_is_not_an_event_is_refused_at_start_up(class_: type) -> None:
    with pytest.raises(InvalidInput, match="is not an event class"):
        EventTypes([class_])


def test_a_field_that_cannot_be_encoded_is_refused_at_start_up() -> None:
    @dataclass
    class Odd:
        path: LineModel

    with pytest.raises(InvalidInput, match="cannot be an event"):
        EventTypes([Odd])


def test_two_classes_of_one_name_are_refused() -> None:
    @tidebook.event_type("Line")
    @dataclass
    class Other:
        amount: int

    with pytest.raises(InvalidInput, match="both have the event type 'Line'"):
        EventTypes([Line, Other])


# ---- versions


@tidebook.event_type("deposited", version=3, upcasters={
    1: lambda value: {"amount": value["sum"]},
    2: lambda value: value | {"currency": "EUR"},
})  # fmt: skip
class Deposited(msgspec.Struct):
    amount: Decimal
    currency: str


@pytest.mark.parametrize(
    ("version", "raw"), [(1, b'{"sum":"5.10"}'), (2, b'{"amount":"5.10"}'), (3, b'{"amount":"5.10","currency":"EUR"}')]
)
def test_earlier_versions_are_upcast_step_by_step(version: int, raw: bytes) -> None:
    types = EventTypes([Deposited])
    found = stored(types, Deposited(Decimal(1), "CHF"), version=version, payload=raw)
    assert found == Deposited(Decimal("5.10"), "EUR")


@pytest.mark.parametrize(
    ("upcasters", "match"),
    [({}, "from version 1, 2"), ({2: dict}, "from version 1"), ({1: dict, 2: dict, 3: dict}, "no step from version 3")],
)
def test_a_hole_in_the_versions_is_refused_at_start_up(upcasters: Any, match: str) -> None:
    with pytest.raises(InvalidInput, match=match):
        tidebook.event_type("deposited", version=3, upcasters=upcasters)(Line)


def test_versions_before_the_oldest_need_no_upcaster() -> None:
    class Moved(msgspec.Struct):
        by: int

    tidebook.event_type("moved", version=3, oldest=2, upcasters={2: lambda value: value})(Moved)
    types = EventTypes([Moved])
    assert stored(types, Moved(1), version=2) == Moved(1)
    with pytest.raises(UnknownEventType):
        stored(types, Moved(1), version=1)


@pytest.mark.parametrize(
    ("changes", "known", "match"),
    [
        ({"version": 4}, 3, "knows version 3"),
        ({"type": "paid"}, None, "no class declares"),
        ({"type": None}, None, "without a type"),
    ],
)
def test_an_unknown_type_or_a_newer_version_is_an_error_that_names_the_event(
    changes: Any, known: int | None, match: str
) -> None:
    with pytest.raises(UnknownEventType, match=match) as caught:
        stored(EventTypes([Deposited]), Deposited(Decimal(1), "EUR"), **changes)
    error = caught.value
    assert (error.topic, error.id, error.seq_nr, error.known) == ("orders", "o-1", 7, known)
    assert "orders/o-1: event 7" in str(error)


def test_a_lenient_reader_gets_it_raw() -> None:
    types = EventTypes([Deposited], lenient=True)
    assert stored(types, Deposited(Decimal("1.5"), "EUR"), version=4) == {"amount": "1.5", "currency": "EUR"}


@pytest.mark.parametrize("raw", [b"{}", b"5", b"{", b'{"amount":[]}'], ids=repr)
def test_a_value_that_does_not_fit_its_class_is_an_error_that_names_the_event(raw: bytes) -> None:
    for version in (1, 3):
        with pytest.raises((UnreadableEvent, tidebook.Corrupt)) as caught:
            stored(EventTypes([Deposited]), Deposited(Decimal(1), "EUR"), payload=raw, version=version)
        if isinstance(caught.value, UnreadableEvent):
            assert (caught.value.topic, caught.value.id, caught.value.seq_nr) == ("orders", "o-1", 7)


# ---- in a journal


async def test_a_typed_journal_takes_and_returns_objects(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        orders = book.journal("orders", events=[type(each) for each in OBJECTS])
        done = await orders.append("o-1", [OBJECTS[0], Event(OBJECTS[1], tags={"paid"})])
        assert (done.first, done.last) == (1, 2)
        await orders.append_many([("o-1", [OBJECTS[2]])])
        read = [event async for event in orders.read("o-1")]
        assert [event.data for event in read] == OBJECTS
        assert [(event.topic, event.id, event.seq_nr) for event in read] == [("orders", "o-1", n) for n in (1, 2, 3)]
        assert (read[1].tags, read[1].type, read[1].version) == (frozenset({"paid"}), "OrderedAsStruct", 1)
        [raw, *_] = [event async for event in book.journal("orders").read("o-1")]
        assert (raw.type, raw.payload["color"]) == ("OrderedAsDataclass", "blue")


async def test_two_versions_of_an_event_are_read_from_one_journal(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        await book.journal("accounts").append("a-1", [Event({"sum": "2"}, type="deposited", version=1)])
        accounts = book.journal("accounts", events=[Deposited])
        await accounts.append("a-1", [Deposited(Decimal(3), "CHF")])
        found = [event.data async for event in accounts.read("a-1")]
        assert found == [Deposited(Decimal(2), "EUR"), Deposited(Decimal(3), "CHF")]


def test_the_blocking_form_of_a_typed_journal(tmp_path: Path) -> None:
    with tidebook.open_sync(tmp_path) as book:
        accounts = book.journal("accounts", events=[Deposited])
        accounts.append("a-1", [Deposited(Decimal(3), "CHF")])
        assert [event.data for event in accounts.read("a-1")] == [Deposited(Decimal(3), "CHF")]
        assert accounts.topic == "accounts"
