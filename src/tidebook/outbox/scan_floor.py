"""The scan floor of a topic: the id at or below which no row waits, and none can still appear.

A batch is the first rows by id. While any snapshot is held open, deleted rows stay in the index, and each batch would
scan all rows that were ever relayed. Starting after the last id would skip transactions that commit late, and break the
order of a key. So the floor follows the last ids only once no such transaction is left.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

SEEN_MAX = 100


class ScanFloor:
    """The scan floor of one topic, raised as batches are selected.

    Every transaction has its number (xid) before it draws an id. So if a select sees an id and misses a row with a
    lower one, the row's transaction has an xid below any that is drawn after the select, for example by the relay's
    next batch. (The xmax of a snapshot would not do: it is one above the last transaction that has ended, and higher
    ones may be running.) Once the `xmin` that a later batch reads has reached that xid, all such transactions have
    ended. Then the select of that batch sees all their rows, and the floor rises to the id.
    """

    def __init__(self, rewinds: int) -> None:
        self.at = 0
        self.rewinds = rewinds
        #: Ids, each with a transaction number drawn after the select that saw it.
        self._seen: deque[tuple[int, int]] = deque(maxlen=SEEN_MAX)
        #: The last id that the last select saw; the next batch's number is not drawn yet.
        self._newest: int | None = None
        self._xid = 0
        self._lock = threading.Lock()

    def advance(self, ids: Sequence[int], *, full: bool, xmin: int, xid: int) -> None:
        """Raise the floor after a select above it returned these ids, which are all that exist unless it is `full`.

        `xid` is the number of the selecting transaction, drawn before this select and after the previous one.
        """
        with self._lock:
            if xid <= self._xid:  # reported late: a later batch was reported first
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


class ScanFloors:
    """The scan floors of all topics, shared by the threads of a process."""

    def __init__(self) -> None:
        self._floors: dict[str, ScanFloor] = {}
        self._incarnation: object = None

    def of(self, topic: str, rewinds: int | None = None) -> ScanFloor:
        """Return a topic's floor; with `rewinds`, a new one if parked rows were moved back since."""
        floor = self._floors.get(topic)
        if floor is None or (rewinds is not None and floor.rewinds != rewinds):
            floor = self._floors[topic] = ScanFloor(rewinds or 0)
        return floor

    def known(self) -> tuple[list[str], list[int], list[int]]:
        """Return three lists: topics, their floors, and the rewinds for which these floors are valid."""
        known = [(topic, floor) for topic, floor in list(self._floors.items()) if floor.at]
        floors = [floor for _, floor in known]
        return [topic for topic, _ in known], [floor.at for floor in floors], [floor.rewinds for floor in floors]

    def reset_unless(self, incarnation: object) -> None:
        """Discard all floors if the table has another incarnation: it may have been restored."""
        if incarnation != self._incarnation:
            self._incarnation = incarnation
            self._floors = {}
