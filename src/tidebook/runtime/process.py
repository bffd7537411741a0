"""Detect the use of an object in a forked child, without a system call for the process id on each use."""

from __future__ import annotations

import os

from tidebook.core.errors import InvalidInput

_forks = 0


def generation() -> int:
    """Return the fork generation of this process. Store it in objects that must not be used in a forked child."""
    return _forks


def refuse_fork(made_in: int, what: str) -> None:
    """Raise InvalidInput if `what`, which was created in generation `made_in`, is used in a forked child."""
    if made_in != _forks:
        raise InvalidInput(f"{what} was opened before this process forked: open a book in the child")


def _after_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_after_fork)
