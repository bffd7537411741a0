"""Detect the use of an object in a forked child, without a system call for the process id on each use."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

from tidebook.core.errors import InvalidInput


class Inherited(Protocol):
    """What a forked child has from its parent and must not use."""

    def inherited(self) -> None:
        """Prepare for being refused; called in the child, before anything else runs there."""


_forks = 0
_notified: WeakSet[Inherited] = WeakSet()


def generation() -> int:
    """Return the fork generation of this process. Store it in objects that must not be used in a forked child."""
    return _forks


def refuse_fork(made_in: int, what: str) -> None:
    """Raise InvalidInput if `what`, which was created in generation `made_in`, is used in a forked child."""
    if made_in != _forks:
        raise forked_error(what)


def forked_error(what: str) -> InvalidInput:
    """Return the error for the use of `what` in a forked child."""
    return InvalidInput(f"{what} was opened before this process forked: open a book in the child")


def notify_of_forks(kept: Inherited) -> None:
    """Call `kept.inherited()` in every forked child, for as long as `kept` exists."""
    _notified.add(kept)


def _after_fork() -> None:
    global _forks
    _forks += 1
    for kept in list(_notified):
        kept.inherited()


os.register_at_fork(after_in_child=_after_fork)
