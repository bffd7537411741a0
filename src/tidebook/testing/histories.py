"""Small histories of a journal: actions made by hand, every history of a length, and random ones for Hypothesis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tidebook.core.action import Action, Append, Delete, Mark, Purge
from tidebook.core.event import Event, encode_event, pack_events
from tidebook.core.fold import Change, Lost, Unchanged, fold
from tidebook.core.head import Head
from tidebook.core.position import FIRST_EPOCH, START, Position
from tidebook.core.topic import TopicFacts

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

#: The log's time of offset 0; each further record comes a second later.
FIRST_MS = 1_700_000_000_000


def append(
    count: int = 1,
    *,
    expected: int | None = None,
    at: int | None = None,
    expire_after_ms: int | None = None,
    append_id: bytes = b"",
    floor: int | None = None,
    payload: bytes = b"",
    epoch: int = FIRST_EPOCH,
) -> Append:
    """An append of `count` events whose payloads tell them apart; without an id it wants one from who places it."""
    body = pack_events([encode_event(Event(b"%d:" % i + payload)) for i in range(count)])
    return Append(epoch, append_id, count, body, expected, at, expire_after_ms, floor)


def delete(to: int, *, incarnation: Position | None = None, epoch: int = FIRST_EPOCH) -> Delete:
    """A delete up to a number."""
    return Delete(epoch, to, incarnation)


def purge(*, if_position: Position | None = None, epoch: int = FIRST_EPOCH) -> Purge:
    """A purge, with or without a condition."""
    return Purge(epoch, if_position)


def placed_at(action: Append, offset: int) -> Append:
    """The append with an id, and payloads, that say at which offset it stands."""
    return msgspec.structs.replace(
        append(action.count, payload=b"@%d" % offset),
        epoch=action.epoch,
        append_id=action.append_id or offset.to_bytes(16, "big"),
        expected=action.expected,
        at=action.at,
        expire_after_ms=action.expire_after_ms,
        floor=action.floor,
    )


class Letter(NamedTuple):
    """One kind of action, made for the journal as it stands."""

    name: str
    make: Callable[[Head | None], Action]


def _letter(name: str, action: Action) -> Letter:
    return Letter(name, lambda head: action)


#: All kinds of actions, over numbers small enough to meet one another.
LETTERS: Mapping[str, Letter] = {
    letter.name: letter
    for letter in (
        _letter("next x1", append()),
        _letter("next x2", append(2)),
        _letter("expected 0", append(2, expected=0)),
        _letter("expected 1", append(expected=1)),
        _letter("expected 2", append(expected=2)),
        _letter("at 3", append(at=3)),
        _letter("jump", append(at=9)),
        _letter("delete 1", delete(1)),
        _letter("delete 2", delete(2)),
        _letter("delete 5", delete(5)),
        _letter("purge", purge()),
        # What an expiry sends: right for the head as it stands, and too late for one that has moved on.
        Letter("purge if here", lambda head: purge(if_position=head.position if head is not None else START)),
        _letter("purge if there", purge(if_position=Position(FIRST_EPOCH, 0))),
        _letter("mark", Mark(FIRST_EPOCH)),
    )
}


def grow(head: Head | None, offset: int, letters: Iterable[Letter], facts: TopicFacts) -> Iterator[Grown]:
    """Every way in which a history goes on by one action, void ones of a kind only once.

    A void append does what a mark does, so one of them stands for all.
    """
    void_met = False
    for letter in letters:
        action = letter.make(head)
        if isinstance(action, Append):
            action = placed_at(action, offset)
        new, change = fold(head, action, Position(facts.epoch, offset), FIRST_MS + 1000 * offset, facts)
        if isinstance(change, Lost):
            if void_met:
                continue
            void_met = True
        yield Grown(letter.name, action, new, change)


class Grown(NamedTuple):
    """A further action of a history, and what the fold makes of it."""

    name: str
    action: Action
    head: Head | None
    change: Change


def histories(length: int, letters: Sequence[Letter], facts: TopicFacts) -> Iterator[tuple[Action, ...]]:
    """Every history of this length whose first action does something: others are shorter ones behind a mark."""

    def go_on(head: Head | None, done: tuple[Action, ...]) -> Iterator[tuple[Action, ...]]:
        if len(done) == length:
            yield done
            return
        for grown in grow(head, len(done), letters, facts):
            if done or not isinstance(grown.change, Lost | Unchanged):
                yield from go_on(grown.head, (*done, grown.action))

    yield from go_on(None, ())


def random_histories(facts: TopicFacts, *, most: int = 40) -> SearchStrategy[list[Action]]:
    """Histories of any length up to `most`, each action made for the journal as it stands. Needs Hypothesis."""
    from hypothesis import strategies as st

    kinds = st.sampled_from(list(_RANDOM))
    return st.lists(st.tuples(kinds, st.integers(1, 7), st.integers(-3, 12)), min_size=1, max_size=most).map(
        lambda rolls: _history(rolls, facts)
    )


def _history(rolls: Iterable[tuple[str, int, int]], facts: TopicFacts) -> list[Action]:
    head: Head | None = None
    done: list[Action] = []
    for offset, (kind, count, near) in enumerate(rolls):
        last = head.seq_nr if head is not None and head.live else 0
        action = _RANDOM[kind](head, count, max(0, last + near))
        if isinstance(action, Append):
            action = placed_at(action, offset)
        head, _ = fold(head, action, Position(facts.epoch, offset), FIRST_MS + 1000 * offset, facts)
        done.append(action)
    return done


#: From the head, a count, and a number near the last one.
_RANDOM: Mapping[str, Callable[[Head | None, int, int], Action]] = {
    "next": lambda head, count, number: append(count),
    "expected": lambda head, count, number: append(count, expected=number),
    "expected the last": lambda head, count, number: append(
        count, expected=head.seq_nr if head is not None and head.live else 0
    ),
    "at": lambda head, count, number: append(count, at=number + 1),
    "expiring": lambda head, count, number: append(expire_after_ms=count),
    "repeated": lambda head, count, number: append(append_id=bytes([count]) * 16),
    "delete": lambda head, count, number: delete(number),
    "delete of this life": lambda head, count, number: delete(
        number, incarnation=head.incarnation if head is not None else START
    ),
    "purge": lambda head, count, number: purge(),
    "purge if here": lambda head, count, number: purge(if_position=head.position if head is not None else START),
    "purge if there": lambda head, count, number: purge(if_position=Position(FIRST_EPOCH, count)),
    "mark": lambda head, count, number: Mark(FIRST_EPOCH),
}
