"""Passwords, which show themselves to nobody by accident."""

from __future__ import annotations

from typing import Any

#: Added to what is said of a bad URL: a password with one of these in it cuts the URL in the wrong place.
QUOTE = " (in a user or password, write /, ?, # and @ as %2F, %3F, %23 and %40)"


class Secret:
    """A text that shows itself to nobody who does not ask for it by name.

    >>> Secret("hunter2")
    ***
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself."""
        return self._text

    def __repr__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> str:
        raise TypeError("a secret is not pickled: give a password_file to other processes")


def read_secret(kind: type, value: Any) -> Any:
    """A hook for msgspec: text becomes a secret."""
    if kind is Secret:
        if isinstance(value, Secret):
            return value
        if isinstance(value, str):
            return Secret(value)
        raise ValueError("password must be text")
    raise NotImplementedError(kind)
