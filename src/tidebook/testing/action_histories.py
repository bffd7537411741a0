"""Generate small histories of a journal for tests: all histories of a given length, or random ones from Hypothesis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tidebook.core.action import Action, Append, Delete, Mark, Purge
from tidebook.core.event import Event, encode_event, pack_events
from tidebook.core.fold import Change, Rejected, Unchanged, fold
from tidebook.core.head import Head
from tidebook.core.position import FIRST_EPOCH, START, Position
from tidebook.core.topic_config import TopicConfig

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

#: The timestamp of offset 0; each later record follows after a second.
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
    """Return an append of `count` events with different payloads; if it has no `append_id`, `placed_at` sets one."""
    body = pack_events([encode_event(Event(b"%d:" % i + payload)) for i in range(count)])
    return Append(epoch, append_id, count, body, expected, at, expire_after_ms, floor)


def delete(to: int, *, incarnation: Position | None = None, epoch: int = FIRST_EPOCH) -> Delete:
    """Return a delete of the events up to sequence number `to`."""
    return Delete(epoch, to, incarnation)


def purge(*, if_position: Position | None = None, epoch: int = FIRST_EPOCH) -> Purge:
    """Return a purge, with or without a condition."""
    return Purge(epoch, if_position)


def placed_at(action: Append, offset: int) -> Append:
    """Return the append with payloads derived from its offset, and, if it has no append id, an id derived from it."""
    return msgspec.structs.replace(
        append(action.count, payload=b"@%d" % offset),
        epoch=action.epoch,
        append_id=action.append_id or offset.to_bytes(16, "big"),
        expected=action.expected,
        at=action.at,
        expire_after_ms=action.expire_after_ms,
        floor=action.floor,
    )


class ActionTemplate(NamedTuple):
    """A kind of action, which `make` creates for the current head of the journal."""

    name: str
    make: Callable[[Head | None], Action]


def _fixed(name: str, action: Action) -> ActionTemplate:
    return ActionTemplate(name, lambda head: action)


#: All kinds of actions, with numbers so small that they collide.
ACTION_TEMPLATES: Mapping[str, ActionTemplate] = {
    template.name: template
    for template in (
        _fixed("next x1", append()),
        _fixed("next x2", append(2)),
        _fixed("expected 0", append(2, expected=0)),
        _fixed("expected 1", append(expected=1)),
        _fixed("expected 2", append(expected=2)),
        _fixed("at 3", append(at=3)),
        _fixed("jump", append(at=9)),
        _fixed("delete 1", delete(1)),
        _fixed("delete 2", delete(2)),
        _fixed("delete 5", delete(5)),
        _fixed("purge", purge()),
        # The purge of an expiry, once for the current head, and once for a head that has changed since.
        ActionTemplate("purge if here", lambda head: purge(if_position=head.position if head is not None else START)),
        _fixed("purge if there", purge(if_position=Position(FIRST_EPOCH, 0))),
        _fixed("mark", Mark(FIRST_EPOCH)),
    )
}


def extensions(
    head: Head | None, offset: int, templates: Iterable[ActionTemplate], config: TopicConfig
) -> Iterator[Extension]:
    """Yield every extension of a history by one action; of rejected appends, which have no effect, yield only one."""
    has_rejected = False
    for template in templates:
        action = template.make(head)
        if isinstance(action, Append):
            action = placed_at(action, offset)
        new, change = fold(head, action, Position(config.epoch, offset), FIRST_MS + 1000 * offset, config)
        if isinstance(change, Rejected):
            if has_rejected:
                continue
            has_rejected = True
        yield Extension(template.name, action, new, change)


class Extension(NamedTuple):
    """The next action of a history, with the head and the change that the fold returns for it."""

    name: str
    action: Action
    head: Head | None
    change: Change


def histories(length: int, templates: Sequence[ActionTemplate], config: TopicConfig) -> Iterator[tuple[Action, ...]]:
    """Yield every history of this length whose first action has an effect.

    A history whose first action has none is equivalent to a shorter one after a mark.
    """

    def extend(head: Head | None, actions: tuple[Action, ...]) -> Iterator[tuple[Action, ...]]:
        if len(actions) == length:
            yield actions
            return
        for step in extensions(head, len(actions), templates, config):
            if actions or not isinstance(step.change, Rejected | Unchanged):
                yield from extend(step.head, (*actions, step.action))

    yield from extend(None, ())


def random_histories(config: TopicConfig, *, most: int = 40) -> SearchStrategy[list[Action]]:
    """Return a Hypothesis strategy for histories of up to `most` actions, each made for the current head."""
    from hypothesis import strategies as st

    kinds = st.sampled_from(list(_RANDOM))
    return st.lists(st.tuples(kinds, st.integers(1, 7), st.integers(-3, 12)), min_size=1, max_size=most).map(
        lambda draws: _history(draws, config)
    )


def _history(draws: Iterable[tuple[str, int, int]], config: TopicConfig) -> list[Action]:
    head: Head | None = None
    actions: list[Action] = []
    for offset, (kind, count, distance) in enumerate(draws):
        last = head.seq_nr if head is not None and head.live else 0
        action = _RANDOM[kind](head, count, max(0, last + distance))
        if isinstance(action, Append):
            action = placed_at(action, offset)
        head, _ = fold(head, action, Position(config.epoch, offset), FIRST_MS + 1000 * offset, config)
        actions.append(action)
    return actions


#: Functions by name that return an action for the head, a count, and a number near the last one.
_RANDOM: Mapping[str, Callable[[Head | None, int, int], Action]] = {
    "next": lambda head, count, number: append(count),
    "expected": lambda head, count, number: append(count, expected=number),
    "expected the last": lambda head, count, number: append(
        count, expected=head.seq_nr if head is not None and head.live else 0
    ),
    "at": lambda head, count, number: append(count, at=number + 1),
    "expiring": lambda head, count, number: append(expire_after_ms=count),
    "repeated": lambda head, count, number: append(append_id=bytes([count]) * 16),
    "delete": lambda head, count, number: delete(max(number, 1)),
    "delete of this incarnation": lambda head, count, number: delete(
        max(number, 1), incarnation=head.incarnation if head is not None else START
    ),
    "purge": lambda head, count, number: purge(),
    "purge if here": lambda head, count, number: purge(if_position=head.position if head is not None else START),
    "purge if there": lambda head, count, number: purge(if_position=Position(FIRST_EPOCH, count)),
    "mark": lambda head, count, number: Mark(FIRST_EPOCH),
}
