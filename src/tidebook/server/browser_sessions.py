"""Browsers that are signed in: a cookie with a random id, kept in the server's memory.

A restart of the server signs browsers out. Revoking a token ends its sessions.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from hashlib import sha256
from typing import Final

import msgspec

COOKIE: Final = "tidebook_session"
SESSIONS_MAX: Final = 10_000
#: One more session of a token ends its oldest, so that no token can end the sessions of others.
SESSIONS_PER_TOKEN_MAX: Final = 1_000


class BrowserSession(msgspec.Struct, frozen=True):
    """One browser that is signed in."""

    #: The hash of its cookie.
    key: bytes
    token_id: str
    csrf_token: str
    ends_s: float


class BrowserSessions:
    """The sessions by the hash of their cookie, the oldest first."""

    def __init__(self, *, session_s: float) -> None:
        self._session_s = session_s
        self._sessions: OrderedDict[bytes, BrowserSession] = OrderedDict()

    def begin(self, token_id: str) -> tuple[str, BrowserSession]:
        """Begin a session; return the value of its cookie, and the session."""
        value = secrets.token_urlsafe(32)
        ends_s = time.monotonic() + self._session_s
        session = BrowserSession(_hash(value), token_id, secrets.token_urlsafe(32), ends_s)
        own = [key for key, each in self._sessions.items() if each.token_id == token_id]
        if len(own) >= SESSIONS_PER_TOKEN_MAX:
            del self._sessions[own[0]]
        self._sessions[session.key] = session
        while len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)
        return value, session

    def find(self, value: str) -> BrowserSession | None:
        """Return the session of a cookie; None if it has ended."""
        key = _hash(value)
        session = self._sessions.get(key)
        if session is not None and session.ends_s <= time.monotonic():
            del self._sessions[key]
            return None
        return session

    def is_open(self, session: BrowserSession) -> bool:
        """Return whether a session has neither ended nor expired."""
        return session.key in self._sessions and session.ends_s > time.monotonic()

    def end(self, value: str) -> None:
        """End a session."""
        self._sessions.pop(_hash(value), None)

    def cookie(self, value: str, *, secure: bool) -> bytes:
        """Return the header that sets the cookie; an empty value removes it."""
        age_s = round(self._session_s) if value else 0
        parts = [f"{COOKIE}={value}", "Path=/", "HttpOnly", "SameSite=Strict", f"Max-Age={age_s}"]
        return "; ".join([*parts, *(["Secure"] if secure else [])]).encode()


def _hash(value: str) -> bytes:
    return sha256(value.encode(errors="replace")).digest()
