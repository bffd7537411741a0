"""Detect the use of an object in a forked child, without a system call for the process id on each use."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

from tidebook.core.errors import InvalidInput


class Inherited(Protocol):
    """An object that a forked child inherits from its parent and must not use."""

    def inherited(self) -> None:
        """Mark the object as inherited; called in the child, before anything else runs there."""


_forks = 0
_notified: WeakSet[Inherited] = WeakSet()


def generation() -> int:
    """Return how many forks led to this process; an object that must not be used in a forked child stores it."""
    return _forks


def refuse_fork(created_in: int, name: str) -> None:
    """Raise InvalidInput if an object that was created in another generation is used; `name` is for the message."""
    if created_in != _forks:
        raise forked_error(name)


def forked_error(name: str) -> InvalidInput:
    """Return the error for the use of an object in a forked child."""
    return InvalidInput(f"{name} was opened before this process forked: open a book in the child")


def notify_of_forks(instance: Inherited) -> None:
    """Call `instance.inherited()` in every forked child, for as long as `instance` exists."""
    _notified.add(instance)


def _after_fork() -> None:
    global _forks
    _forks += 1
    for instance in list(_notified):
        instance.inherited()


os.register_at_fork(after_in_child=_after_fork)
