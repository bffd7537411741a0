"""Which consistency levels let a read see every acknowledged write: all other combinations are rejected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

READ_LEVELS: Final = ("ONE", "TWO", "THREE", "QUORUM", "ALL", "LOCAL_QUORUM", "LOCAL_ONE")
WRITE_LEVELS: Final = (*READ_LEVELS, "EACH_QUORUM")
SERIAL_LEVELS: Final = ("SERIAL", "LOCAL_SERIAL")

_COUNTS: Final = {"ONE": 1, "TWO": 2, "THREE": 3, "LOCAL_ONE": 1}


def replicas_of(replication: Mapping[str, str]) -> dict[str, int]:
    """Return the number of replicas in each data centre, from a keyspace's `replication`.

    A SimpleStrategy counts as one data centre.

    >>> replicas_of({"class": "org.apache.cassandra.locator.NetworkTopologyStrategy", "dc1": "3", "dc2": "2"})
    {'dc1': 3, 'dc2': 2}
    """
    # The count may be "3/1": the transient replicas after the slash hold no data permanently.
    counts = {name: int(count.split("/")[0]) for name, count in replication.items() if name != "class"}
    return {"": counts["replication_factor"]} if "replication_factor" in counts else counts


def reads_see_writes(read: str, write: str, replicas: Mapping[str, int], local_dc: str | None = None) -> bool:
    """Return whether every read at one level overlaps with every acknowledged write at the other: R + W > RF.

    Local levels are evaluated within one data centre, where readers and the pipeline must both run. `local_dc` names
    it; without it the condition must hold in every data centre.

    >>> reads_see_writes("LOCAL_QUORUM", "LOCAL_QUORUM", {"dc1": 3})
    True
    >>> reads_see_writes("LOCAL_ONE", "LOCAL_QUORUM", {"dc1": 3})
    False
    """
    total = sum(replicas.values())
    if not _is_local(read):
        missed = max(_missed_anywhere(write, replicas, dc) for dc in _local_centres(replicas, local_dc))
        return _count(read, total) > missed
    return all(
        _count(read, replicas[dc]) > _missed_within(write, replicas, dc)
        for dc in _local_centres(replicas, local_dc)
        if replicas[dc]
    )


def _local_centres(replicas: Mapping[str, int], local_dc: str | None) -> list[str]:
    return [local_dc] if local_dc is not None and local_dc in replicas else list(replicas)


def _missed_anywhere(write: str, replicas: Mapping[str, int], dc: str) -> int:
    """Return how many replicas in total may lack an acknowledged write."""
    total = sum(replicas.values())
    if write == "EACH_QUORUM":
        return sum(count - _quorum(count) for count in replicas.values())
    return total - (_count(write, replicas[dc]) if _is_local(write) else _count(write, total))


def _missed_within(write: str, replicas: Mapping[str, int], dc: str) -> int:
    """Return how many replicas of one data centre may lack an acknowledged write."""
    here, total = replicas[dc], sum(replicas.values())
    if write == "EACH_QUORUM":
        return here - _quorum(here)
    if _is_local(write):
        return here - _count(write, here)
    return min(here, total - _count(write, total))


def _is_local(level: str) -> bool:
    return level.startswith("LOCAL_")


def _quorum(replicas: int) -> int:
    return replicas // 2 + 1


def _count(level: str, replicas: int) -> int:
    if level.endswith("QUORUM"):
        return _quorum(replicas)
    return replicas if level == "ALL" else min(_COUNTS[level], replicas)
