"""The search finds every broken rule of replication and reading, so its other results are not vacuous."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import pytest

from tests.model import broken
from tests.model.concrete import Concrete
from tests.model.interleaving import violation
from tests.model.lattice import Lattice
from tests.model.lww import land_by_arrival
from tests.model.reading import Answered, BarrierLast, HeadFolded, HeadKnown, MarkFirst, Reading
from tests.model.world import CONFIG, Expander, Planner, Step, World, in_stages
from tidebook.core.action import Action
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.replication_plan import EventRow, plan_key
from tidebook.core.seq_nr import LAST
from tidebook.journal.head_cache import HeadCache
from tidebook.journal.prefetch import PrefetchedRange, RowPrefetcher
from tidebook.journal.reader import Reader
from tidebook.journal.settings import BarrierKind
from tidebook.journal.view import ReadPlan, ReadView, ViewBase, page_is_valid, plan_read, stored_base
from tidebook.testing.action_histories import ACTION_TEMPLATES, ActionTemplate, append, delete, histories, purge

#: It takes about a minute, more on a busy machine, and much more with --long.
pytestmark = pytest.mark.timeout(3600)

SMALL = ["next x1", "next x2", "at 3", "delete 1", "delete 2", "purge"]
WITH_CONDITION = ["next x2", "expected 0", "delete 1", "purge", "purge if there"]


def logs(names: Sequence[str], lengths: Iterable[int]) -> Iterator[list[Step]]:
    for length in lengths:
        for log in histories(length, [ACTION_TEMPLATES[name] for name in names], CONFIG):
            yield [(0, action) for action in log]


def found_by_the_lattice(world: World, *, reader: bool) -> bool:
    lattice = Lattice(world)
    if lattice.violation() is not None:
        return True
    return reader and violation(lattice, world, Reading(world)) is not None


@pytest.mark.parametrize(
    ("planner", "reader"),
    [
        (broken.no_redo, False),
        (broken.head_before_rows, True),
        (broken.tombstones_before_head, True),
        (broken.coalesced_purge, True),
        (broken.nothing_for_the_short_lived, False),
        (broken.raw_delete_bound, False),
        (broken.clears_from_the_old_bound, False),
        (broken.no_guard, False),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planner_with_a_broken_rule_is_found(planner: Planner, reader: bool) -> None:
    assert any(found_by_the_lattice(World(log, planner=planner), reader=reader) for log in logs(SMALL, (2, 3, 4)))


@pytest.mark.parametrize("expander", [broken.all_at_once, broken.stamped_by_batch, broken.without_graves])
def test_writes_in_broken_stages_or_under_broken_stamps_are_found(expander: Expander) -> None:
    assert any(
        found_by_the_lattice(World(log, expander=expander), reader=True) for log in logs(WITH_CONDITION, (2, 3, 4))
    )


#: Segments hold two numbers: each of these appends jumps over one, and deletes include the jump.
JUMPS: list[Action] = [append(), append(at=5), append(at=9), delete(5), purge()]


def jumping(lengths: Iterable[int]) -> Iterator[list[Step]]:
    letters = [ActionTemplate(str(i), lambda _, action=action: action) for i, action in enumerate(JUMPS)]  # type: ignore[misc]
    for length in lengths:
        for log in histories(length, letters, CONFIG):
            yield [(0, action) for action in log]


@pytest.mark.parametrize(
    "planner",
    [broken.unlisted, broken.listed_after_the_head, broken.forgotten_before_cleared, broken.never_forgotten],
    ids=lambda value: value.__name__,
)
def test_a_planner_that_keeps_the_list_of_segments_wrongly_is_found(planner: Planner) -> None:
    assert any(found_by_the_lattice(World(log, planner=planner), reader=True) for log in jumping((2, 3)))


def test_a_clear_that_does_not_read_the_list_of_segments_is_found() -> None:
    worlds = (World(log, expander=broken.cleared_without_the_list) for log in jumping((2, 3)))
    assert any(found_by_the_lattice(world, reader=False) for world in worlds)


def test_a_head_that_is_not_rewritten_is_found_if_writes_in_flight_are_visible() -> None:
    """A head is read in flight, its record is skipped, the pointer moves on, and the head never becomes durable."""
    worlds = [World(log, planner=broken.redo_without_the_head) for log in logs(SMALL, (1, 2))]
    assert all(Lattice(world).violation() is None for world in worlds)
    assert any(Lattice(world, flicker=True).violation() is not None for world in worlds)


# ---- faults that only two replicators, step by step, can show


def traced(log: Sequence[Step], **how: object) -> list[str] | None:
    return Concrete(World(log), **how).trace()  # type: ignore[arg-type]


def test_stamps_by_a_clock_are_found_and_the_trace_is_reported() -> None:
    traces = (Concrete(World(log, landing=land_by_arrival)).trace() for log in logs(SMALL, (2, 3)))
    trace = next(trace for trace in traces if trace is not None)
    assert trace[0].startswith("P")
    assert "the fold says" in trace[-1] or "moved back" in trace[-1]


def test_heads_that_are_read_before_the_pointer_are_found() -> None:
    assert any(traced(log, heads_first=True) for log in logs(SMALL, (2, 3)))


def test_a_pointer_that_is_written_blindly_is_found() -> None:
    traces = (Concrete(World(log, pointer_goes_back=True)).trace() for log in logs(SMALL, (2,)))
    assert any(trace is not None and "moved back" in trace[-1] for trace in traces)


def test_a_pointer_that_is_written_before_all_keys_are_done_is_found() -> None:
    log: list[Step] = [(0, append()), (1, append()), (1, purge())]
    assert traced(log, pointer_early=True)
    assert Lattice(World(log), pointer_after_all_keys=False).violation()


def test_the_unchanged_rules_hold_step_by_step_too() -> None:
    assert not any(traced(log) for log in logs(SMALL, (1, 2)))
    assert not any(traced(log) for log in logs(["next x2", "delete 1", "purge"], (3,)))


# ---- the reader


def read_is_wrong(
    names: Sequence[str],
    lengths: Iterable[int],
    *,
    page: int = 1,
    start: int = 1,
    readers: Sequence[type[Reader]] = (Reader, BarrierLast),
) -> bool:
    for log in logs(names, lengths):
        world = World(log)
        lattice = Lattice(world)
        for reader in readers:
            if violation(lattice, world, Reading(world, page_events=page, start=start, reader=reader)) is not None:
                return True
    return False


def test_a_reader_that_does_not_look_at_the_head_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidebook.journal.reader.page_is_valid", lambda *_: True)
    monkeypatch.setattr("tidebook.journal.reader.check_rows", lambda *_: None)
    assert read_is_wrong(SMALL, (2, 3))


def test_a_reader_that_compares_only_the_incarnation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tidebook.journal.reader.page_is_valid",
        lambda planned, now, _: now is not None and now.live and now.incarnation == planned.incarnation,
    )
    assert read_is_wrong(SMALL, (2, 3))


def test_a_reader_that_compares_only_the_deletes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tidebook.journal.reader.page_is_valid",
        lambda _, now, cursor: now is not None and now.live and now.delete_to <= cursor,
    )
    monkeypatch.setattr("tidebook.journal.reader.check_rows", lambda *_: None)
    assert read_is_wrong(["next x1", "next x2", "purge"], (2, 3))


def test_a_reader_that_compares_deletes_with_the_end_of_the_page_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tidebook.journal.reader.page_is_valid",
        lambda planned, now, cursor: page_is_valid(planned, now, cursor + 2),
    )
    assert read_is_wrong(SMALL, (2, 3), page=2)


def test_a_reader_that_asks_for_the_head_before_the_pointer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stored(self: HeadCache, key: Key) -> ViewBase:
        head = await self._store.head(key)
        return stored_base(
            await self._store.pointer(self.topic, self.partition), head, self.topic, self.partition, self.config
        )

    monkeypatch.setattr(HeadCache, "stored", stored)
    assert read_is_wrong(SMALL, (1, 2, 3))


class RowsBeforeHead(HeadKnown):
    """A reader that requests the first rows before it knows any head."""

    async def begin(self, key: Key, kind: BarrierKind, rows: RowPrefetcher, *, after: int, to: int) -> ReadView:
        self.since = len(self.asked)
        found = await self._store.events(key, None, after=after, to=2, limit=2)  # type: ignore[arg-type]
        pointer, head = await self._store.pointer(key.topic, 0), await self._store.head(key)
        if head is not None and head.live:
            rows.begin(head, after=max(after, head.delete_to), to=min(to, head.seq_nr))
            rows.add(PrefetchedRange(after, 2, 2 - after, Answered(found)))
        stored = stored_base(pointer, head, key.topic, 0, CONFIG)
        return await self._view(key, await self.barriers.fix(kind), pointer, stored)


class PointerLast(HeadKnown):
    """A reader that has the rows of an earlier head, and reads the pointer after the head."""

    async def _with_rows(self, key: Key, kind: BarrierKind, known: Head, rows: RowPrefetcher) -> ReadView:
        await self._hold(key, known, rows)
        head = await self._store.head(key)
        pointer = await self._store.pointer(key.topic, 0)
        stored = stored_base(pointer, head, key.topic, 0, CONFIG)
        return await self._view(key, await self.barriers.fix(kind), pointer, stored)


@pytest.mark.parametrize("reader", [RowsBeforeHead, PointerLast])
def test_first_rows_that_are_requested_in_the_wrong_order_are_found(reader: type[Reader]) -> None:
    assert read_is_wrong(SMALL, (1, 2, 3), page=2, readers=[reader])


def test_a_folded_head_that_is_not_fully_replicated_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.model.reading.is_replicated", lambda head, _: head is not None and head.live)
    monkeypatch.setattr("tidebook.journal.view.is_replicated", lambda head, _: head is not None and head.live)
    assert read_is_wrong(SMALL, (1, 2, 3), page=2, readers=[HeadFolded])


def test_rows_that_are_kept_from_a_head_of_another_incarnation_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(self: RowPrefetcher, head: Head, *, after: int, to: int) -> bool:
        self._head, self._to = head, to
        self._events = partial(self._store.events, self._key, head)
        self._end = self._end if self._requested else after
        return True

    monkeypatch.setattr(RowPrefetcher, "begin", begin)
    assert read_is_wrong(SMALL, (2, 3), page=2, readers=[HeadKnown, MarkFirst])


def test_a_page_that_passes_as_complete_with_missing_numbers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_gap_free(rows: Sequence[EventRow], after: int, head: Head) -> bool:
        return all(head.incarnation <= row.position <= head.position for row in rows)

    monkeypatch.setattr("tidebook.journal.reader.is_gap_free", is_gap_free)
    assert read_is_wrong(SMALL, (2, 3))


def test_a_page_that_passes_as_complete_with_rows_of_another_incarnation_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_gap_free(rows: Sequence[EventRow], after: int, head: Head) -> bool:
        return bool(rows) and rows[-1].seq_nr - after == len(rows)

    monkeypatch.setattr("tidebook.journal.reader.is_gap_free", is_gap_free)
    assert read_is_wrong(["next x1", "next x2", "purge"], (3, 4))


def test_a_reader_whose_tail_begins_at_the_pointer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stored(self: HeadCache, key: Key) -> ViewBase:
        pointer = await self._store.pointer(self.topic, self.partition)
        return ViewBase(await self._store.head(key), -1 if pointer is None else pointer.position.offset)

    monkeypatch.setattr(HeadCache, "stored", stored)
    assert read_is_wrong(SMALL, (1, 2, 3))


def test_a_reader_whose_rows_are_not_bounded_by_the_heads_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def unbounded(*, stored: Head | None, folded: Head | None, after: int, to: int) -> ReadPlan | None:
        plan = plan_read(stored=stored, folded=folded, after=after, to=to)
        return plan if plan is None or plan.after == plan.rows_to else plan._replace(rows_to=LAST, to=LAST)

    monkeypatch.setattr("tidebook.journal.view.plan_read", unbounded)
    monkeypatch.setattr("tidebook.journal.reader.check_rows", lambda *_: None)
    assert read_is_wrong(SMALL, (1, 2, 3))


def test_a_reader_that_takes_a_grave_for_a_journal_that_never_was_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 5: The pointer lags and the head is gone, so appends from before the purge are folded onto nothing."""

    async def stored(self: HeadCache, key: Key) -> ViewBase:
        pointer = await self._store.pointer(self.topic, self.partition)
        head = await self._store.head(key)
        return stored_base(
            pointer, head if head is not None and head.live else None, self.topic, self.partition, self.config
        )

    monkeypatch.setattr(HeadCache, "stored", stored)
    assert read_is_wrong(SMALL, (3,))


def test_a_reader_that_continues_in_another_incarnation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidebook.journal.reader.may_continue", lambda *_: True)
    assert read_is_wrong(["next x2", "delete 1", "delete 2", "purge"], (2, 3))


def test_a_reader_whose_plan_is_always_empty_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidebook.journal.view.plan_read", lambda **_: None)
    assert read_is_wrong(SMALL, (1,))


def test_the_unchanged_reader_passes_on_the_same_histories() -> None:
    assert not read_is_wrong(SMALL, (1, 2))
    assert not read_is_wrong(SMALL, (2,), page=2, start=2)


def test_the_unchanged_planner_passes_on_the_same_histories() -> None:
    for log in logs(WITH_CONDITION, (2, 3)):
        assert not found_by_the_lattice(World(log, planner=plan_key, expander=in_stages), reader=False)
