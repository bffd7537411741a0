"""Passwords, which show themselves to nobody by accident."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from tidebook.core.errors import InvalidInput

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


def read_user(who: str) -> dict[str, Any]:
    """User and password as a URL has them before its @.

    >>> read_user("me:a%2Fb")
    {'user': 'me', 'password': 'a/b'}
    """
    user, colon, password = who.partition(":")
    found = {"user": unquote(user)} if who else {}
    return found | {"password": unquote(password)} if colon else found


def with_password(given: Mapping[str, Any], variable: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """What was given; where no password is named there, with that of the environment."""
    named = given.get("password") is not None or given.get("password_file") is not None
    return dict(given) if named or variable not in environment else {**given, "password": environment[variable]}


def check_identity(password: object, password_file: object, cert_file: object, key_file: object) -> None:
    """Refuse two passwords, or half of who we are."""
    if password is not None and password_file is not None:
        raise InvalidInput("password and password_file are both given: keep one")
    if (cert_file is None) != (key_file is None):
        raise InvalidInput("cert_file and key_file go together: a certificate is of no use without its key")
