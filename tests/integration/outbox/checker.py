"""Compare the messages that arrived with those that were committed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from tests.integration.outbox.relaying import Cluster

Numbers = Mapping[bytes, Sequence[int]]


def arrived(cluster: Cluster, topics: Sequence[str]) -> dict[bytes, list[int]]:
    """Return, by key, the numbers of messages `key:number` in the order in which a consumer reads them."""
    found: dict[bytes, list[int]] = defaultdict(list)
    for topic in topics:
        for each in cluster.read(topic):
            key, number = (each.value or b"").decode().split(":")
            assert key.encode() == each.key
            found[key.encode()].append(int(number))
    return dict(found)


def faults(found: Numbers, committed: Numbers) -> set[str]:
    """Return the errors; none if every committed message arrived once and in order."""
    wrong = set()
    for key in found.keys() | committed.keys():
        there, due = list(found.get(key, ())), list(committed.get(key, ()))
        once = list(dict.fromkeys(there))
        if len(once) < len(there):
            wrong.add("twice")
        if set(due) - set(there):
            wrong.add("lost")
        if set(there) - set(due):
            wrong.add("never committed")
        if [number for number in once if number in set(due)] != [number for number in due if number in set(there)]:
            wrong.add("out of order")
    return wrong
