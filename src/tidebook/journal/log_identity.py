"""Detect that a topic's log was deleted and created again, and word the errors for it."""

from __future__ import annotations

from tidebook.core.errors import Corrupt


def adopt_hint(topic: str) -> str:
    """Return the hint for a store that is ahead of the log, or was filled from another one."""
    return f"if the log is right, run 'tidebook journal adopt {topic}': it begins a new epoch on what the store has"


def different_log(topic: str, *, found: str, known: str) -> Corrupt:
    """Return the error for a topic whose id in the log differs from the configured one."""
    return Corrupt(
        f"topic {topic}: the log has another incarnation of it ({found}) than the store was filled from ({known}): "
        f"{adopt_hint(topic)}"
    )


class LogIdentity:
    """Detects that a partition was recreated: in one incarnation of a topic, the offsets of new records only rise."""

    __slots__ = ("_partition", "_topic", "proof")

    def __init__(self, topic: str, partition: int) -> None:
        self._topic = topic
        self._partition = partition
        #: An offset that the log assigned, and a higher or equal one that was seen before. It is never cleared: the
        #: new log may grow past the old one and then look like it.
        self.proof: tuple[int, int] | None = None

    def is_recreated(self, offset: int, sent_after: int) -> bool:
        """Record and return whether the log was recreated: it gave `offset` after `sent_after` had been seen."""
        if offset <= sent_after and self.proof is None:
            self.proof = (offset, sent_after)
        return self.proof is not None

    def error(self) -> Corrupt:
        """Return the error for a recreated log."""
        assert self.proof is not None
        offset, seen = self.proof
        return Corrupt(
            f"{self._topic}/{self._partition}: the log is at offset {offset}, after offset {seen} was seen: its topic "
            "was deleted and made again, or it lost acknowledged records; nothing written to it counts: open the book "
            f"again; {adopt_hint(self._topic)}"
        )

    def check(self) -> None:
        """Raise Corrupt if the log was recreated since this process opened it."""
        if self.proof is not None:
            raise self.error()
