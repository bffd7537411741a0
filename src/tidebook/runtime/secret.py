"""Read passwords from URLs and the environment, and keep them out of reprs, log lines and pickles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from tidebook.core.errors import InvalidInput

#: A hint for errors about malformed URLs: a password with one of these characters makes the URL ambiguous.
QUOTE = " (in a user or password, write /, ?, # and @ as %2F, %3F, %23 and %40)"


class Secret:
    """A string whose repr hides it; `reveal` returns it.

    >>> Secret("hunter2")
    ***
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the string."""
        return self._text

    def __repr__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> str:
        raise TypeError("a secret cannot be pickled: use a password_file for other processes")


def read_secret(kind: type, value: Any) -> Any:
    """Convert text to a Secret, as the `dec_hook` of msgspec."""
    if kind is Secret:
        if isinstance(value, Secret):
            return value
        if isinstance(value, str):
            return Secret(value)
        raise ValueError("password must be a string")
    raise NotImplementedError(kind)


def split_url(url: str, what: str) -> SplitResult:
    """Split a URL; raise InvalidInput, whose message begins with `what`, if its host is malformed.

    The message does not repeat the URL, as Python's may do, because it may contain a password.

    >>> split_url("kafka://me:hunter2@[::1", "[log] url")
    Traceback (most recent call last):
        ...
    tidebook.core.errors.InvalidInput: [log] url is malformed: an IPv6 address is written in brackets, ...
    """
    try:
        return urlsplit(url)
    except ValueError:
        reason = "an IPv6 address is written in brackets, and a host's name has no special characters"
    raise InvalidInput(f"{what} is malformed: {reason}{QUOTE}")


def read_user(userinfo: str) -> dict[str, Any]:
    """Return user and password from the part of a URL before its @.

    >>> read_user("me:a%2Fb")
    {'user': 'me', 'password': 'a/b'}
    """
    user, colon, password = userinfo.partition(":")
    settings = {"user": unquote(user)} if userinfo else {}
    return settings | {"password": unquote(password)} if colon else settings


def with_password(given: Mapping[str, Any], variable: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings; if they have no password, add that of the environment variable."""
    has_password = given.get("password") is not None or given.get("password_file") is not None
    return dict(given) if has_password or variable not in environment else {**given, "password": environment[variable]}


def check_identity(password: object, password_file: object, cert_file: object, key_file: object) -> None:
    """Raise InvalidInput for two passwords, or for a certificate without its key or the reverse."""
    if password is not None and password_file is not None:
        raise InvalidInput("password and password_file are both given: keep one")
    if (cert_file is None) != (key_file is None):
        raise InvalidInput("cert_file and key_file go together: a certificate is of no use without its key")
