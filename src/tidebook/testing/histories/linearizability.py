"""Decide whether calls on one object are linearizable, by a search that remembers the configurations it has tried.

The search is that of Wing and Gong, as improved by Lowe: it visits the beginnings and ends of calls in the order of
time, and lets each call take effect before its end. A configuration consists of the moment, the state, and the calls in
flight that have taken effect. The search tries each configuration once, so it is complete; its memory is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

from tidebook.testing.histories.call import NEVER_NS, RecordedCall

S = TypeVar("S", bound=Hashable)
#: Returns the state after a call, or None if the call could not have returned its result in this state. Of a call of
#: unknown outcome it returns None also if the call would change nothing, because the search can leave that call out.
Step = Callable[[S, RecordedCall], S | None]

#: Returns a key that an unknown call shares with the calls that are interchangeable with it; None if there are none.
Kind = Callable[[RecordedCall], Hashable | None]

CONFIGURATIONS_MAX = 1_000_000


class Linearizable(NamedTuple):
    """The calls are linearizable."""

    configurations: int


class NotLinearizable(NamedTuple):
    """No order of the calls explains their results; `call` is the first that no order could explain."""

    configurations: int
    call: RecordedCall
    #: The possible states after the calls that ended before, in none of which this call is possible.
    states: tuple[Hashable, ...]


class Undecided(NamedTuple):
    """The search reached its limit, after this many configurations, before it could decide."""

    configurations: int


class _Moment(NamedTuple):
    """The beginning or the end of a call."""

    ns: int
    is_end: bool
    number: int


def find_order(
    calls: Sequence[RecordedCall],
    initial: S,
    step: Step[S],
    kind: Kind,
    *,
    configurations_max: int = CONFIGURATIONS_MAX,
) -> Linearizable | NotLinearizable | Undecided:
    """Search for an order of the calls that respects their times and explains every result.

    Each step tries only the earliest unknown call of each `kind`: if a later one explains the results, so does it.
    """
    kinds = [kind(call) if call.end_ns == NEVER_NS else None for call in calls]
    moments = sorted(
        [
            *(_Moment(call.start_ns, False, index) for index, call in enumerate(calls)),
            *(_Moment(call.end_ns, True, index) for index, call in enumerate(calls) if call.end_ns < NEVER_NS),
        ]
    )
    in_flight = _in_flight(calls, moments)
    tried: set[tuple[int, S, frozenset[int]]] = set()
    stack: list[tuple[int, S, frozenset[int]]] = [(0, initial, frozenset())]
    furthest, stuck = -1, list[Hashable]()
    while stack:
        at, state, applied = stack.pop()
        while at < len(moments) and (not moments[at].is_end or moments[at].number in applied):
            if moments[at].is_end:
                applied -= {moments[at].number}
            at += 1
        if at == len(moments):
            return Linearizable(len(tried))
        configuration = (at, state, applied)
        if configuration in tried:
            continue
        if len(tried) >= configurations_max:
            return Undecided(len(tried))
        tried.add(configuration)
        ending = moments[at].number
        if at > furthest:
            furthest, stuck = at, []
        if at == furthest and len(stuck) < 10:
            stuck.append(state)
        # The call pushed last is tried first: the one that ends now, then the others by their end, unknown ones last.
        seen: set[Hashable] = set()
        for index in in_flight[at]:
            if index != ending and index not in applied and kinds[index] not in seen:
                if kinds[index] is not None:
                    seen.add(kinds[index])
                after = step(state, calls[index])
                if after is not None:
                    stack.append((at, after, applied | {index}))
        after = step(state, calls[ending])
        if after is not None:
            stack.append((at, after, applied | {ending}))
    return NotLinearizable(len(tried), calls[moments[furthest].number], tuple(dict.fromkeys(stuck)))


def _in_flight(calls: Sequence[RecordedCall], moments: Sequence[_Moment]) -> list[tuple[int, ...]]:
    """Return the calls in flight at each end of a call, in descending order of their ends."""
    found: list[tuple[int, ...]] = []
    current: list[int] = []
    for moment in moments:
        if moment.is_end:
            found.append(tuple(sorted(current, key=lambda index: -calls[index].end_ns)))
            current.remove(moment.number)
        else:
            found.append(())
            current.append(moment.number)
    return found
