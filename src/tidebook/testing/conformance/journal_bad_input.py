"""Test cases of bad input: it raises a typed error and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from tidebook.core.errors import InvalidInput, OutcomeUnknown, TooLarge
from tidebook.core.event import Event
from tidebook.core.seq_nr import LAST
from tidebook.testing.conformance.journal_base import JournalSuite, JournalTester, events, numbers

ID = b"0123456789abcdef"


class BadInputCases(JournalSuite):
    """Test cases of refused input. One facade is enough, because input is checked before the log or store is used."""

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"expected": -1}, "expected"),
            ({"expected": LAST + 1}, "expected"),
            ({"expected": "1"}, "expected"),
            ({"expected": True}, "expected"),
            ({"at": 0}, "at"),
            ({"at": -1}, "at"),
            ({"at": LAST + 1}, "at"),
            ({"at": 1.0}, "at"),
            ({"expected": 0, "at": 1}, "not both"),
            ({"append_id": b"short"}, "16 bytes"),
            ({"append_id": "0123456789abcdef"}, "16 bytes"),
            ({"expire_after": 5}, "timedelta"),
            ({"retry": ValueError("x")}, "retry"),
            ({"retry": OutcomeUnknown("x")}, "retry"),
            ({"retry": OutcomeUnknown("x", append_id=ID), "append_id": ID}, "retry"),
        ],
        ids=repr,
    )
    async def test_a_bad_option_is_refused_and_changes_nothing(
        self, plain: JournalTester, options: dict[str, Any], reason: str
    ) -> None:
        with pytest.raises(InvalidInput, match=reason):
            await plain.append("a", events("x"), **options)
        assert await plain.pointer("a") is None

    @pytest.mark.parametrize(
        "bad",
        [[], (), None, "text", b"bytes", Event(1), {"a": 1}, 5, ["x"], [None], iter([Event(1)])],
        ids=lambda bad: "iterator" if isinstance(bad, Iterator) else repr(bad),
    )
    async def test_anything_but_a_list_of_events_is_refused(self, plain: JournalTester, bad: Any) -> None:
        with pytest.raises(InvalidInput):
            await plain.append("a", bad)
        assert await plain.pointer("a") is None

    @pytest.mark.parametrize("bad", ["", "x" * 1001, "\ud800", "a\x00", None, 5, b"a"], ids=repr)
    async def test_a_bad_id_is_refused_everywhere(self, plain: JournalTester, bad: Any) -> None:
        for attempt in (
            lambda: plain.append(bad, events("x")),
            lambda: plain.read(bad),
            lambda: plain.pointer(bad),
            lambda: plain.delete(bad, to=1),
            lambda: plain.purge(bad),
            lambda: plain.save_snapshot(bad, seq_nr=1, payload=1),
            lambda: plain.load_snapshot(bad),
        ):
            with pytest.raises(InvalidInput, match="id"):
                await attempt()

    async def test_a_record_over_the_limit_is_refused_with_size_and_limit(self, plain: JournalTester) -> None:
        limit = (await plain.journal.create()).limit_bytes
        with pytest.raises(TooLarge) as caught:
            await plain.append("a", events(b"x" * limit))
        assert caught.value.limit_bytes == limit
        assert caught.value.size_bytes > limit
        assert await plain.pointer("a") is None

    @pytest.mark.parametrize(
        "options",
        [{"start": 0}, {"start": -1}, {"end": 0}, {"start": LAST + 1}, {"start": "1"}, {"end": None}, {"barrier": "x"}],
        ids=repr,
    )
    async def test_a_bad_range_is_refused(self, plain: JournalTester, options: dict[str, Any]) -> None:
        with pytest.raises(InvalidInput):
            await plain.read("a", **options)

    @pytest.mark.parametrize("to", [0, -1, LAST + 1, "1", None, 1.5, True], ids=repr)
    async def test_a_delete_to_an_invalid_number_is_refused(self, plain: JournalTester, to: Any) -> None:
        await plain.append("a", events(1))
        with pytest.raises(InvalidInput, match="to"):
            await plain.delete("a", to=to)
        assert numbers(await plain.read("a")) == [1]

    @pytest.mark.parametrize("bad", [timedelta(0), timedelta(seconds=-1), timedelta(microseconds=1)], ids=repr)
    async def test_an_expiry_below_a_millisecond_is_refused(self, plain: JournalTester, bad: timedelta) -> None:
        with pytest.raises(InvalidInput, match="expire_after"):
            await plain.append("a", events(1), expire_after=bad)

    @pytest.mark.parametrize("to", [0, -1, "1", LAST + 1], ids=repr)
    async def test_a_bad_bound_of_snapshots_is_refused(self, plain: JournalTester, to: Any) -> None:
        await plain.append("a", events(1))
        with pytest.raises(InvalidInput, match="to"):
            await plain.load_snapshot("a", to=to)
        with pytest.raises(InvalidInput, match="to"):
            await plain.delete_snapshots("a", to=to)

    async def test_a_snapshot_over_the_limit_is_refused(self, plain: JournalTester) -> None:
        await plain.append("a", events(1))
        limit = (await plain.journal.create()).limit_bytes
        with pytest.raises(TooLarge):
            await plain.save_snapshot("a", seq_nr=1, payload=b"x" * (limit + 1))
