"""Many appends in one call: all of them are checked first, then their records are made some at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from tidebook.core.clock import Ids
from tidebook.core.errors import InvalidInput
from tidebook.core.event import NOT_PLAIN, Event, plain_payloads
from tidebook.core.record import PLAIN_BYTES_MAX, encode_plain_appends
from tidebook.core.topic import TopicFacts

#: Records that are made before the log is given them: few enough to stay in the processor's cache.
RECORDS_AT_ONCE = 1000
#: How often so many may be on their way: memory is bounded, however many a call brings.
AHEAD_MAX = 20


def pairs(items: Iterable[tuple[str, Sequence[Event]]]) -> tuple[list[str], list[Sequence[Event]]]:
    """The ids and the events of what a caller gave."""
    ids, appends = list[str](), list[Sequence[Event]]()
    try:
        for id, events in items:
            ids.append(id)
            appends.append(events)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"append_many takes pairs of an id and its events: {error}") from error
    return ids, appends


class Checked:
    """Appends that were checked: plain payloads with their types, whole records of all others."""

    def __init__(
        self, appends: Sequence[Sequence[Event]], facts: TopicFacts, encode: Callable[[Sequence[Event]], bytes]
    ) -> None:
        self._epoch = facts.epoch
        self._kinds, self._data = kinds, data = plain_payloads(appends)
        plain_max = facts.limit_bytes - PLAIN_BYTES_MAX
        for number, size_bytes in enumerate(map(len, data)):
            if not 0 < size_bytes <= plain_max:
                kinds[number], data[number] = NOT_PLAIN, encode(appends[number])

    def values(self, some: slice, ids: Ids) -> list[bytes]:
        """The records of some of them."""
        kinds, data = self._kinds[some], self._data[some]
        if NOT_PLAIN not in kinds:
            return encode_plain_appends(self._epoch, ids.several(len(kinds)), kinds, data)
        plain = [number for number, kind in enumerate(kinds) if kind != NOT_PLAIN]
        of_plain = [kinds[number] for number in plain], [data[number] for number in plain]
        made = encode_plain_appends(self._epoch, ids.several(len(plain)), *of_plain)
        for number, record in zip(plain, made, strict=True):
            data[number] = record
        return data


def at_once(count: int) -> Iterator[slice]:
    """All of them, some at a time."""
    return (slice(start, start + RECORDS_AT_ONCE) for start in range(0, count, RECORDS_AT_ONCE))
