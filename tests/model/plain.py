"""A journal as a plain list, without log, store or replication: the behaviour that users are promised."""

from __future__ import annotations

from dataclasses import dataclass, field

#: How many appends of a journal are remembered.
REMEMBERED = 16


@dataclass
class Incarnation:
    """One incarnation of a journal: its events by number, and the snapshots that were saved of it."""

    last: int = 0
    events: dict[int, int] = field(default_factory=dict)
    snapshots: dict[int, int] = field(default_factory=dict)


@dataclass
class Plain:
    """All incarnations of one journal."""

    incarnation: Incarnation | None = None
    appended: list[tuple[bytes, int, int]] = field(default_factory=list)

    @property
    def last(self) -> int:
        return self.incarnation.last if self.incarnation is not None else 0

    def known(self, append_id: bytes) -> tuple[int, int] | None:
        for id, first, last in self.appended[-REMEMBERED:]:
            if id == append_id:
                return first, last
        return None

    def append(self, append_id: bytes, payloads: list[int], *, expected: int | None, at: int | None) -> int | None:
        """The first number, or None where it is void."""
        if (expected is not None and expected != self.last) or (at is not None and at <= self.last):
            return None
        first = at if at is not None else self.last + 1
        if self.incarnation is None:
            self.incarnation = Incarnation()
        for i, payload in enumerate(payloads):
            self.incarnation.events[first + i] = payload
        self.incarnation.last = first + len(payloads) - 1
        self.appended.append((append_id, first, self.incarnation.last))
        return first

    def delete(self, to: int) -> None:
        if self.incarnation is None:
            self.incarnation = Incarnation(last=to)
            return
        for number in [number for number in self.incarnation.events if number <= to]:
            del self.incarnation.events[number]

    def purge(self) -> None:
        self.incarnation = None

    def read(self, start: int, end: int) -> list[tuple[int, int]]:
        if self.incarnation is None:
            return []
        return sorted((n, payload) for n, payload in self.incarnation.events.items() if start <= n <= end)

    def save(self, seq_nr: int, payload: int, slots: int) -> None:
        assert self.incarnation is not None
        self.incarnation.snapshots[seq_nr] = payload
        for number in sorted(self.incarnation.snapshots)[:-slots]:
            del self.incarnation.snapshots[number]

    def load(self) -> tuple[int, int] | None:
        if self.incarnation is None or not self.incarnation.snapshots:
            return None
        newest = max(self.incarnation.snapshots)
        return newest, self.incarnation.snapshots[newest]
