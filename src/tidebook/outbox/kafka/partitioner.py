"""Kafka's default partitioner, for messages whose partition is chosen by `partition_key`."""

from __future__ import annotations

from functools import lru_cache

_M = 0x5BD1E995
_SEED = 0x9747B28C
_32 = 0xFFFFFFFF


@lru_cache(maxsize=65_536)
def murmur2(data: bytes) -> int:
    """Return the hash used by Kafka's Java client and by librdkafka's `murmur2` partitioners.

    >>> murmur2(b"21") == -973932308 & 0xFFFFFFFF
    True
    """
    length = len(data)
    h = _SEED ^ length
    words = length & ~3
    for at in range(0, words, 4):
        k = int.from_bytes(data[at : at + 4], "little") * _M & _32
        k ^= k >> 24
        h = (h * _M & _32) ^ (k * _M & _32)
    if rest := data[words:]:
        h ^= int.from_bytes(rest, "little")
        h = h * _M & _32
    h ^= h >> 13
    h = h * _M & _32
    return h ^ h >> 15


def partition_of(data: bytes, partitions: int) -> int:
    """Return the partition that Kafka's clients choose for a key."""
    return (murmur2(data) & 0x7FFFFFFF) % partitions
