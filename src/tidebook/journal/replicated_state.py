"""The state of a journal in the store, as a read starts from it."""

from __future__ import annotations

from tidebook.core.errors import Fenced
from tidebook.core.head import Head
from tidebook.core.replication_plan import Pointer


class ReplicatedState:
    """The head in the store, and the offset through which it is known to be replicated.

    The pointer must be read before the head: head and events then contain at least what the pointer covers.
    """

    __slots__ = ("as_of", "head")

    def __init__(self, pointer: Pointer | None, head: Head | None, epoch: int) -> None:
        self.head = head
        known = [each.position for each in (pointer, head) if each is not None]
        if any(position.epoch > epoch for position in known):
            raise Fenced(f"the topic has moved on from epoch {epoch}: open the book again")
        #: The last offset of this epoch that is known to be replicated, or -1.
        self.as_of = max((position.offset for position in known if position.epoch == epoch), default=-1)

    @classmethod
    def empty(cls, as_of: int) -> ReplicatedState:
        """Return the state of a journal whose first record comes after offset `as_of`."""
        stored = cls(None, None, 0)
        stored.as_of = as_of
        return stored
