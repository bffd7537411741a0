"""Where a topic's waiting rows begin: below it none is left, and none can still appear.

A batch is the first rows by id. Under a snapshot that somebody holds open, deleted rows stay in the index, and each
batch would walk over all that were ever relayed. Going on behind the last id would pass over transactions that commit
late, and so break the order of a key. So the floor follows the last ids only when no such transaction is left.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

SEEN_MAX = 100


class Floor:
    """One topic's floor, raised as batches go by.

    Every transaction has its number (xid) before it draws an id: so a row at or below an id that a select saw, and
    which that select did not see, belongs to a transaction below any number that is drawn after the select. The relay
    draws one itself when it begins the next batch. (A snapshot's xmax would not do: it is one above the last
    transaction that has ended, and others above it may be running.) Once all of those have ended (`xmin` of a later
    select, read before it), that later select has seen every such row.
    """

    def __init__(self, rewinds: int) -> None:
        self.at = 0
        self.rewinds = rewinds
        #: Ids, each with a transaction number that was drawn after the select that saw it.
        self._seen: deque[tuple[int, int]] = deque(maxlen=SEEN_MAX)
        #: What the last select saw: the next batch's number is not drawn yet.
        self._newest: int | None = None
        self._xid = 0
        self._lock = threading.Lock()

    def saw(self, ids: Sequence[int], *, full: bool, xmin: int, xid: int) -> None:
        """A select from the floor on returned these ids: all there are, unless it is `full`.

        `xid` is the number of the transaction that selected, drawn before the select and after the one before it.
        """
        with self._lock:
            if xid <= self._xid:  # told late: a batch that was selected behind this one was told before it
                return
            self._xid = xid
            if self._newest is not None:
                self._seen.append((self._newest, xid))
                self._newest = None
            covered: int | None = None
            while self._seen and self._seen[0][1] <= xmin and (not full or ids[-1] >= self._seen[0][0]):
                covered = self._seen.popleft()[0]
            if covered is not None:
                self.at = max(self.at, min(covered, ids[0] - 1) if ids else covered)
            if ids and (not self._seen or self._seen[-1][0] < ids[-1]):
                self._newest = ids[-1]


class Floors:
    """The floors of all topics, shared by the threads of a process."""

    def __init__(self) -> None:
        self._floors: dict[str, Floor] = {}
        self._life: object = None

    def of(self, topic: str, rewinds: int | None = None) -> Floor:
        """A topic's floor as it is known; with `rewinds`, begun anew where rows came back from the side since."""
        floor = self._floors.get(topic)
        if floor is None or (rewinds is not None and floor.rewinds != rewinds):
            floor = self._floors[topic] = Floor(rewinds or 0)
        return floor

    def known(self) -> tuple[list[str], list[int], list[int]]:
        """Topics, their floors, and the rewinds that these floors are good for."""
        known = [(topic, floor) for topic, floor in list(self._floors.items()) if floor.at]
        return (
            [topic for topic, _ in known],
            [floor.at for _, floor in known],
            [floor.rewinds for _, floor in known],
        )

    def are_of(self, life: object) -> None:
        """Begin anew everywhere where this life of the table is another one: it may have been restored."""
        if life != self._life:
            self._life = life
            self._floors = {}
