"""The store's side of a journal."""

from __future__ import annotations

from tidebook.core.errors import Fenced
from tidebook.core.head import Head
from tidebook.core.replication import Pointer


class Stored:
    """The store's side of a journal, read in the order that the rules want: the pointer, then the head."""

    __slots__ = ("as_of", "head")

    def __init__(self, pointer: Pointer | None, head: Head | None, epoch: int) -> None:
        self.head = head
        known = [each.position for each in (pointer, head) if each is not None]
        if any(position.epoch > epoch for position in known):
            raise Fenced(f"the topic has moved on from epoch {epoch}: open the book again")
        #: The last offset of this epoch that head and events are known to contain, or -1.
        self.as_of = max((position.offset for position in known if position.epoch == epoch), default=-1)

    @classmethod
    def nothing(cls, as_of: int) -> Stored:
        """What the store would say of a journal that begins behind `as_of`."""
        stored = cls(None, None, 0)
        stored.as_of = as_of
        return stored
