"""Validate the appends of one `append_many` call, and encode their records batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from tidebook.core.errors import InvalidInput
from tidebook.core.event import NOT_PLAIN, Event, plain_payloads
from tidebook.core.record import PLAIN_BYTES_MAX, encode_plain_appends
from tidebook.core.topic_config import TopicConfig
from tidebook.runtime.clock import Ids

#: Records that are encoded and sent together: few enough to stay in the processor's cache.
BATCH_RECORDS = 1000
#: Batches that may await their acknowledgement: this bounds the memory of a call with any number of appends.
BATCHES_IN_FLIGHT_MAX = 20


def split_pairs(items: Iterable[tuple[str, Sequence[Event]]]) -> tuple[list[str], list[Sequence[Event]]]:
    """Return the ids and the event lists as two columns; raise InvalidInput if an item is not a pair."""
    ids, appends = list[str](), list[Sequence[Event]]()
    try:
        for id, events in items:
            ids.append(id)
            appends.append(events)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"append_many takes pairs of an id and its events: {error}") from error
    return ids, appends


class EncodedAppends:
    """Validated appends: a plain append is kept as payload and payload type, any other one as its encoded record.

    Plain records are encoded later, a batch at a time, which is much cheaper than one by one.
    """

    def __init__(
        self, appends: Sequence[Sequence[Event]], config: TopicConfig, encode: Callable[[Sequence[Event]], bytes]
    ) -> None:
        self._epoch = config.epoch
        self._kinds, self._data = kinds, data = plain_payloads(appends)
        plain_max = config.limit_bytes - PLAIN_BYTES_MAX
        for index, size_bytes in enumerate(map(len, data)):
            if not 0 < size_bytes <= plain_max:
                kinds[index], data[index] = NOT_PLAIN, encode(appends[index])

    def values(self, batch: slice, ids: Ids) -> list[bytes]:
        """Return the encoded records of one batch, each with a new append id."""
        kinds, data = self._kinds[batch], self._data[batch]
        if NOT_PLAIN not in kinds:
            return encode_plain_appends(self._epoch, ids.several(len(kinds)), kinds, data)
        plain = [index for index, kind in enumerate(kinds) if kind != NOT_PLAIN]
        columns = [kinds[index] for index in plain], [data[index] for index in plain]
        encoded = encode_plain_appends(self._epoch, ids.several(len(plain)), *columns)
        for index, record in zip(plain, encoded, strict=True):
            data[index] = record
        return data


def batches(count: int) -> Iterator[slice]:
    """Return slices of at most `BATCH_RECORDS` that cover `count` items."""
    return (slice(start, start + BATCH_RECORDS) for start in range(0, count, BATCH_RECORDS))
