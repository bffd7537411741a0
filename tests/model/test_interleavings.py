"""Explore any number of replicators, crashes after each write, zombies, replays, and a reader between their steps."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from tests.model.interleaving import violation
from tests.model.lattice import Lattice
from tests.model.reading import BarrierLast, HeadFolded, HeadKnown, MarkFirst, PointerKnown, Reading, SplitRanges
from tests.model.world import CONFIG, Step, World
from tidebook.core.action import Action
from tidebook.core.seq_nr import LAST
from tidebook.journal.reader import Reader
from tidebook.testing.action_histories import (
    ACTION_TEMPLATES,
    ActionTemplate,
    append,
    delete,
    extensions,
    histories,
    purge,
)

#: It takes about a minute, more on a busy machine, and much more with --long.
pytestmark = pytest.mark.timeout(3600)

ALL = list(ACTION_TEMPLATES.values())
SMALL = [ACTION_TEMPLATES[name] for name in ("next x1", "next x2", "at 3", "delete 2", "purge")]

#: Ways to read: the range of numbers, the events per page, and the reader, which decides when the barrier is fixed.
READS: list[tuple[int, int, int, type[Reader]]] = [
    (1, LAST, 1, Reader),
    (1, LAST, 2, BarrierLast),
    (2, LAST, 1, BarrierLast),
    (1, 2, 1, Reader),
    (1, LAST, 1, HeadKnown),
    (1, LAST, 2, MarkFirst),
    (2, LAST, 1, MarkFirst),
    (1, LAST, 1, PointerKnown),
    (1, LAST, 1, HeadFolded),
    (1, LAST, 2, HeadFolded),
    (1, LAST, 2, SplitRanges),
    (1, LAST, 4, HeadKnown),
]
SEED = 20_261_116


def check(
    log: Sequence[Step],
    reads: Iterable[tuple[int, int, int, type[Reader]]],
    *,
    flicker: bool = False,
) -> int:
    """Explore a log under these reads; return the number of store states."""
    world = World(log)
    lattice = Lattice(world, flicker=flicker)
    found = lattice.violation()
    for start, to, page_events, reader in reads:
        reading = Reading(world, start=start, to=to, page_events=page_events, reader=reader)
        found = found or violation(lattice, world, reading)
    assert found is None, f"{found}\n{world.shown()}"
    return len(lattice.edges)


def alone(log: Sequence[Action]) -> list[Step]:
    return [(0, action) for action in log]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_every_history_of_up_to_3_actions_holds_in_every_order_of_steps(length: int, long_form: bool) -> None:
    for i, log in enumerate(histories(length, ALL, CONFIG)):
        check(alone(log), READS if long_form or length < 3 else [READS[i % len(READS)]])


@pytest.mark.long
def test_every_history_of_4_actions_holds_in_every_order_of_steps() -> None:
    for i, log in enumerate(histories(4, ALL, CONFIG)):
        check(alone(log), [READS[i % len(READS)]])


@pytest.mark.parametrize(("length", "sample"), [(4, 80), (5, 20)])
def test_a_random_sample_of_longer_histories_holds_in_every_order_of_steps(
    length: int, sample: int, long_form: bool
) -> None:
    for i in range(sample * (50 if long_form else 1)):
        seed = SEED + i
        log = random_history(random.Random(seed), length)
        try:
            check(alone(log), [READS[i % len(READS)]])
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


def random_history(dice: random.Random, length: int) -> list[Action]:
    head, done = None, []
    for offset in range(length):
        grown = dice.choice(list(extensions(head, offset, ALL, CONFIG)))
        head = grown.head
        done.append(grown.action)
    return done


def test_a_journal_re_created_under_a_read_is_read_from_its_start() -> None:
    check(alone([append(2), delete(1), purge(), append(2)]), READS)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_writes_in_flight_that_one_read_sees_and_the_next_does_not_change_nothing(length: int, long_form: bool) -> None:
    for i, log in enumerate(histories(length, ALL if long_form else SMALL, CONFIG)):
        check(alone(log), [READS[i % len(READS)]], flicker=True)


#: Segments hold two numbers: each of these jumps over at least one segment.
JUMPS = [append(), append(at=5), append(2, at=9), append(at=14), delete(5), delete(10), purge()]


@pytest.mark.parametrize("length", [2, 3])
def test_segments_after_jumps_are_found_in_every_order_of_steps(length: int, long_form: bool) -> None:
    templates = [ActionTemplate(str(i), lambda _, action=action: action) for i, action in enumerate(JUMPS)]  # type: ignore[misc]
    for i, log in enumerate(histories(length, templates, CONFIG)):
        check(alone(log), [READS[i % len(READS)]], flicker=long_form)


@pytest.mark.parametrize(
    "log",
    [
        pytest.param([append(at=5), append(2, at=9), delete(9), purge()], id="deleted, then purged"),
        pytest.param([append(), append(at=9), purge(), append(at=5)], id="two incarnations"),
        pytest.param([append(at=5), append(at=9), append(at=14), purge()], id="three runs", marks=pytest.mark.long),
        pytest.param(
            [append(at=5), append(at=9), delete(5), append(at=14), purge()],
            id="jumps, a delete and a purge",
            marks=pytest.mark.long,
        ),
    ],
)
def test_lists_of_segments_hold_with_writes_in_flight(log: list[Action]) -> None:
    check(alone(log), [READS[0]], flicker=True)


def test_two_journals_of_one_partition_do_not_affect_one_another(long_form: bool) -> None:
    steps: list[Step] = [(0, append()), (0, delete(1)), (0, purge()), (1, append()), (1, purge())]
    for first in steps:
        for second in steps:
            check([first, second], READS)
            for third in steps:
                check([first, second, third], READS if long_form else READS[:1])
