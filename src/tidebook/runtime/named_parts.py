"""The parts of a book by name; a name that was only looked up takes no memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

Part = TypeVar("Part")


class NamedParts(Generic[Part]):
    """One object for each name in use, shared by its callers.

    An object that is not open yet is only kept while a caller refers to it, because the clients of a server may ask for
    any number of names that do not exist. An open object is kept until it is removed.
    """

    def __init__(self) -> None:
        #: The open objects by name; callers may read it, to avoid a call.
        self.opened: dict[str, Part] = {}
        self._unopened: WeakValueDictionary[str, Part] = WeakValueDictionary()

    def find(self, name: str) -> Part | None:
        """Return the object of a name; None if no caller uses it."""
        return self.opened.get(name) or self._unopened.get(name)

    def add(self, name: str, part: Part) -> Part:
        """Add an object that is not open yet, and return it."""
        self._unopened[name] = part
        return part

    def keep(self, name: str, part: Part) -> Part:
        """Keep an object until it is removed, and return it."""
        self.opened[name] = part
        self._unopened.pop(name, None)
        return part

    def remove(self, name: str) -> Part | None:
        """Forget the object of a name, and return it if it was open."""
        self._unopened.pop(name, None)
        return self.opened.pop(name, None)

    def __iter__(self) -> Iterator[Part]:
        yield from list(self.opened.values())
        yield from list(self._unopened.values())
