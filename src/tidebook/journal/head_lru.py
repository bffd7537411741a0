"""An LRU cache of journal heads, bounded in count and in bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from tidebook.core.head import Head

#: The measured memory of the parts of a head: the head with its cache entry, each recent append, each jump.
HEAD_BYTES: Final = 600
RECENT_BYTES: Final = 240
JUMP_BYTES: Final = 100
#: The memory of each tag without its characters.
TAG_BYTES: Final = 110


class HeadLru(OrderedDict[str, Head | None]):
    """Heads by journal id; None means that the journal does not exist.

    It is a dict, so that a lookup needs no Python call. Only `keep` may add heads: it maintains `bytes_held`.
    """

    def __init__(self, *, count_max: int, bytes_max: int) -> None:
        super().__init__()
        self._count_max = count_max
        self._bytes_max = bytes_max
        self.bytes_held = 0

    def keep(self, id: str, head: Head | None) -> None:
        """Store a head as the most recently used one, and evict others; the newest stays, however large it is."""
        if id in self:
            grown = _memory_growth(self[id], head)
            self[id] = head
            self.move_to_end(id)
        else:
            grown = len(id) + _memory_bytes(head)
            self[id] = head
        if grown:  # usually zero, and every append calls this
            self.bytes_held += grown
            self._evict()

    def _evict(self) -> None:
        while len(self) > 1 and (self.bytes_held > self._bytes_max or len(self) > self._count_max):
            id, oldest = self.popitem(last=False)
            self.bytes_held -= len(id) + _memory_bytes(oldest)

    def clear(self) -> None:
        """Remove all heads."""
        super().clear()
        self.bytes_held = 0


def _memory_bytes(head: Head | None) -> int:
    if head is None:
        return HEAD_BYTES
    tags = head.tag_counts
    tags_bytes = sum(map(len, tags)) + TAG_BYTES * len(tags) if tags else 0
    return HEAD_BYTES + RECENT_BYTES * len(head.recent) + JUMP_BYTES * len(head.jumps) + tags_bytes


def _memory_growth(before: Head | None, after: Head | None) -> int:
    """Return the difference in memory; add up the tags, of which there may be thousands, only if they have changed."""
    if before is None or after is None or before.tag_counts is not after.tag_counts:
        return _memory_bytes(after) - _memory_bytes(before)
    recent, jumps = len(after.recent) - len(before.recent), len(after.jumps) - len(before.jumps)
    return RECENT_BYTES * recent + JUMP_BYTES * jumps
