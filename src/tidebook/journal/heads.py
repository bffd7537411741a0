"""Heads that a process remembers, the least recently used of them forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from tidebook.core.head import Head

#: What parts of a head take in memory, as measured: the head itself with its place here, and what it has many of.
HEAD_BYTES: Final = 600
RECENT_BYTES: Final = 240
JUMP_BYTES: Final = 100
#: Beside the tag's own characters.
TAG_BYTES: Final = 110


class Heads(OrderedDict[str, Head | None]):
    """Heads by id, None where there is no journal: bounded by their number and their bytes, whichever comes first.

    A dict, so that asking for one costs what it costs there; heads come in through `keep` alone.
    """

    def __init__(self, *, count_max: int, bytes_max: int) -> None:
        super().__init__()
        self._count_max = count_max
        self._bytes_max = bytes_max
        self.bytes_held = 0

    def keep(self, id: str, head: Head | None) -> None:
        """Remember a head as the one that was used last; it stays, however large it is."""
        if id in self:
            grown = _growth(self[id], head)
            self[id] = head
            self.move_to_end(id)
        else:
            grown = len(id) + _weight(head)
            self[id] = head
        if grown:  # mostly not: every append comes here
            self.bytes_held += grown
            self._forget_some()

    def _forget_some(self) -> None:
        while len(self) > 1 and (self.bytes_held > self._bytes_max or len(self) > self._count_max):
            id, oldest = self.popitem(last=False)
            self.bytes_held -= len(id) + _weight(oldest)

    def clear(self) -> None:
        """Forget all of them."""
        super().clear()
        self.bytes_held = 0


def _weight(head: Head | None) -> int:
    if head is None:
        return HEAD_BYTES
    tags = head.tag_counts
    tags_bytes = sum(map(len, tags)) + TAG_BYTES * len(tags) if tags else 0
    return HEAD_BYTES + RECENT_BYTES * len(head.recent) + JUMP_BYTES * len(head.jumps) + tags_bytes


def _growth(before: Head | None, after: Head | None) -> int:
    """The difference of their weights; tags, of which there may be thousands, are counted only where some came."""
    if before is None or after is None:
        return _weight(after) - _weight(before)
    if before.tag_counts is after.tag_counts and before.jumps is after.jumps:
        return RECENT_BYTES * (len(after.recent) - len(before.recent))
    if before.incarnation == after.incarnation and len(before.tag_counts) == len(after.tag_counts):
        # The same tags: within one life of a journal they only come, and none goes.
        recent, jumps = len(after.recent) - len(before.recent), len(after.jumps) - len(before.jumps)
        return RECENT_BYTES * recent + JUMP_BYTES * jumps
    return _weight(after) - _weight(before)
