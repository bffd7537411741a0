"""Encode increasing row ids in few bytes, as gaps and lengths of runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tidebook.core.errors import Corrupt


def runs(ids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and last id of each run of consecutive ids; `ids` must be increasing.

    >>> list(runs([1, 2, 3, 7]))
    [(1, 3), (7, 7)]
    """
    if isinstance(ids, list) and ids and ids[-1] - ids[0] == len(ids) - 1:  # one run, as in most batches
        yield ids[0], ids[-1]
        return
    first = last = None
    for id in ids:
        if first is None or last is None:
            first = last = id
        elif id == last + 1:
            last = id
        else:
            yield first, last
            first = last = id
    if first is not None and last is not None:
        yield first, last


def pack_ids(ids: Iterable[int]) -> bytes:
    """Return increasing ids as bytes."""
    packed = bytearray()
    at = 0
    for first, last in runs(ids):
        _put(packed, first - at)
        _put(packed, last - first)
        at = last + 1
    return bytes(packed)


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """Return the ids of packed bytes; raise Corrupt if they are damaged. The inverse of `pack_ids`."""
    numbers = _numbers(packed)
    ids: list[int] = []
    at = 0
    for gap in numbers:
        length = next(numbers, None)
        if length is None:
            raise Corrupt("kafka_topic_info.session_ids is damaged: it ends in the middle of a run")
        ids += range(at + gap, at + gap + length + 1)
        at += gap + length + 1
    return tuple(ids)


def _put(packed: bytearray, number: int) -> None:
    while number >= 0x80:
        packed.append(number & 0x7F | 0x80)
        number >>= 7
    packed.append(number)


def _numbers(packed: bytes) -> Iterator[int]:
    number = shift = 0
    for byte in packed:
        number |= (byte & 0x7F) << shift
        if byte & 0x80:
            shift += 7
        else:
            yield number
            number = shift = 0
    if shift:
        raise Corrupt("kafka_topic_info.session_ids is damaged: it ends in the middle of a number")
