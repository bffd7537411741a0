"""Errors have their facts as fields, and their text names them."""

from __future__ import annotations

import pytest

from tidebook.core.errors import (
    Conflict,
    EventParked,
    LogLost,
    MissingTaggedEvent,
    OutcomeUnknown,
    ProjectionStopped,
    TooLarge,
    UnknownEventType,
    UnknownVersion,
    UnreadableEvent,
    format_int,
)


@pytest.mark.parametrize(
    ("type_", "known", "reason"),
    [(None, None, "without a type"), ("paid", None, "no class declares"), ("paid", 2, "knows version 2")],
)
def test_an_unknown_event_type_names_the_event_and_the_reason(
    type_: str | None, known: int | None, reason: str
) -> None:
    error = UnknownEventType(topic="orders", id="o-1", seq_nr=7, type=type_, version=3, known=known)
    assert isinstance(error, UnreadableEvent)
    assert (error.topic, error.id, error.seq_nr, error.type, error.version, error.known) == (
        "orders", "o-1", 7, type_, 3, known,
    )  # fmt: skip
    assert reason in error.reason
    assert f"orders/o-1: event 7 of type {type_!r}, version 3, cannot be read" in str(error)


def test_a_stopped_projection_names_its_slice_and_the_command_that_resumes_it() -> None:
    error = ProjectionStopped(name="totals", slice=3, reason="orders/o-1, event 7")
    assert (error.name, error.slice, error.reason) == ("totals", 3, "orders/o-1, event 7")
    assert "projection resume totals" in str(error)


def test_a_parked_event_names_itself_and_the_command_that_rebuilds_the_read_model() -> None:
    error = EventParked(name="totals", event="orders/o-1/7", reason="it does not add up")
    assert (error.name, error.event, error.reason) == ("totals", "orders/o-1/7", "it does not add up")
    assert "parked orders/o-1/7: it does not add up" in str(error)
    assert "projection rebuild totals" in str(error)


def test_a_newer_version_is_named_together_with_the_known_one() -> None:
    error = UnknownVersion("the record", version=9, known=1)
    assert (error.version, error.known) == (9, 1)
    assert str(error).startswith("the record has version 9, and this version of Tidebook supports up to 1")


@pytest.mark.parametrize(
    ("expected", "at", "found", "texts"),
    [
        (3, None, 5, ["expected seq_nr 3", "last seq_nr is 5", "that you have not seen"]),
        (None, 4, 5, ["seq_nr 4 must be above", "last seq_nr is 5", "that you have not seen"]),
        (None, None, 5, ["last seq_nr 5", "largest one", "another journal"]),
        (None, None, None, ["last seq_nr is", "largest one", "another journal"]),
        (3, None, None, ["expected seq_nr 3", "had changed", "read the journal"]),
    ],
)
def test_a_conflict_names_the_expected_and_the_found_number(
    expected: int | None, at: int | None, found: int | None, texts: list[str]
) -> None:
    error = Conflict(key="orders/o-1", expected=expected, at=at, found=found)
    assert (error.key, error.expected, error.at, error.found) == ("orders/o-1", expected, at, found)
    assert all(text in str(error) for text in texts)


def test_other_errors_name_their_facts() -> None:
    assert "takes 2,000 bytes and the limit is 1,000" in str(TooLarge("it", size_bytes=2000, limit_bytes=1000))
    assert str(OutcomeUnknown("no answer")) == str(OutcomeUnknown(message="no answer")) == "no answer"
    lost = LogLost(topic="orders", partition=2, first=3, last=7)
    assert str(lost) == "orders/2: the log lost offsets 3 to 7 before they were replicated"
    assert str(LogLost(topic="orders", partition=2, first=3, last=7, remedy="do this")) == f"{lost}: do this"
    missing = MissingTaggedEvent(tag="x", topic="orders", id="a", missing=(3, 4), last_known_offset="z")
    assert "orders/a lacks tag_seq_nr 3 to 4" in str(missing)
    assert (missing.missing, missing.last_known_offset) == ((3, 4), "z")


def test_only_numbers_with_too_many_digits_are_not_printed() -> None:
    assert format_int((1 << 128) - 1) == str((1 << 128) - 1)
    assert format_int(1 << 128) == "a number of 129 bits"
