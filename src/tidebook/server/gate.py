"""Decides whether a request is accepted, by its Host, origin and sender, the role of its route, and its rate."""

from __future__ import annotations

import secrets
from typing import Final
from urllib.parse import urlsplit

from tidebook.api.access import Role
from tidebook.api.errors import PermissionDenied, SignInRequired
from tidebook.api.route import Route
from tidebook.core.errors import InvalidInput
from tidebook.server.audit_entry import AUDIT_TOPIC
from tidebook.server.browser_sessions import COOKIE, BrowserSession, BrowserSessions
from tidebook.server.headers import Headers
from tidebook.server.principal import ANONYMOUS, LOCAL, Principal
from tidebook.server.rate_limit import RateLimit
from tidebook.server.tokens import Tokens
from tidebook.wal.topics import namespace_of

LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_BEARER = "bearer "


class Gate:
    """Checks the requests of one server."""

    def __init__(
        self,
        tokens: Tokens,
        sessions: BrowserSessions,
        rate: RateLimit,
        *,
        loopback: bool,
        host: str = "127.0.0.1",
        allowed_hosts: tuple[str, ...] = (),
    ) -> None:
        self._tokens = tokens
        self._sessions = sessions
        self._rate = rate
        self.loopback = loopback
        #: The names that a Host header may have; None if any.
        self._hosts: frozenset[str] | None = None
        if loopback or allowed_hosts:
            names = {*allowed_hosts, *([host, *LOOPBACK_NAMES] if loopback else [])}
            self._hosts = frozenset(each.lower().strip("[]") for each in names)
        self._known_hosts: set[str] = set()

    def check_host(self, headers: Headers) -> None:
        """Refuse a Host that is not this server's, so that no page of another name reaches it by DNS rebinding."""
        host = headers.host
        if host is None or self._hosts is None or host in self._known_hosts:
            return
        name = _host_name(host)
        if name not in self._hosts:
            raise PermissionDenied(
                f"this server is not {name[:100]!r}: use its own name, or add that one to [server] allowed_hosts"
            )
        if len(self._known_hosts) < 100:
            self._known_hosts.add(host)

    def check_origin(self, method: str, headers: Headers) -> None:
        """Refuse changes that a page of another site sends: a browser reports it in Sec-Fetch-Site and Origin."""
        if method in _SAFE_METHODS:
            return
        if headers.sec_fetch_site not in (None, "same-origin", "none"):
            raise PermissionDenied("a page of another site may not change anything here")
        if headers.origin is not None and _authority(headers.origin) != (headers.host or "").lower():
            raise PermissionDenied(f"a page of {headers.origin[:100]!r} may not change anything here")

    def authenticate(self, method: str, headers: Headers) -> Principal:
        """Return the sender of a request; raise `SignInRequired` for a token that is not valid."""
        authorization = headers.authorization
        if authorization is not None:
            if authorization[: len(_BEARER)].lower() != _BEARER:
                raise SignInRequired("send the token as 'Authorization: Bearer tb_…'")
            found = self._tokens.find(authorization[len(_BEARER) :].strip())
            if found is None:
                raise SignInRequired(
                    "the token is unknown, revoked or expired: create one with 'tidebook token create'"
                )
            return found
        if headers.cookie is not None and (cookie := headers.cookie_value(COOKIE)) is not None:
            principal = self._of_cookie(cookie, method, headers)
            if principal is not None:
                return principal
        return LOCAL if self.is_open else ANONYMOUS

    def session_of(self, headers: Headers) -> BrowserSession | None:
        """Return the session by which `authenticate` accepts a request; None if it has a token, or needs none."""
        cookie = None if headers.authorization is not None else headers.cookie_value(COOKIE)
        return None if cookie is None else self._sessions.find(cookie)

    def is_current(self, token_id: str, session: BrowserSession | None) -> bool:
        """Return whether a stream that a token, or one of its sessions, has opened may stay open.

        The id is empty if the server needed no token.
        """
        if session is not None and not self._sessions.is_open(session):
            return False
        return self._tokens.holder(token_id) is not None if token_id else self.is_open

    @property
    def is_open(self) -> bool:
        """Whether requests need no token: on loopback, as long as there are no tokens."""
        if not self.loopback:
            return False
        return not self._tokens.any

    def _of_cookie(self, cookie: str, method: str, headers: Headers) -> Principal | None:
        session = self._sessions.find(cookie)
        if session is None:
            return None
        principal = self._tokens.holder(session.token_id)
        if principal is not None and method not in _SAFE_METHODS:
            csrf_token = headers.csrf_token or ""
            if not secrets.compare_digest(csrf_token.encode(), session.csrf_token.encode()):
                raise PermissionDenied("send the csrf_token of GET /v1/session as the header X-CSRF-Token")
        return principal

    def count(self, principal: Principal, client: str) -> None:
        """Count a request, also one that is refused later; raise `TooManyRequests` if there were too many.

        Requests without a token are counted per client address, so that no client uses up the rate of others.
        """
        self._rate.take(principal.id or client)

    def authorize(self, principal: Principal, route: Route, name: str | None, client: str | None = None) -> None:
        """Check the role and the prefix of a token against a route and the name in its path.

        If a client is given, count the request first.
        """
        if client is not None:
            self.count(principal, client)
        if principal.role < route.role:
            if principal.role is Role.PUBLIC:
                raise SignInRequired("this needs a token: send it as 'Authorization: Bearer tb_…'")
            raise PermissionDenied(
                f"{route.name} needs the role {route.role.label}, and this token is a {principal.role.label}",
                required=route.role.label,
            )
        if name is not None:
            self._check_name(principal, route, name)
        elif principal.prefix and route.scope == "book":
            raise PermissionDenied(f"{route.name} concerns the whole book, and this token covers only a prefix")

    def _check_name(self, principal: Principal, route: Route, name: str) -> None:
        if principal.prefix and not all(map(principal.may_see, _names(route, name))):
            raise PermissionDenied(f"this token is for {principal.prefix!r} and what begins with it")
        if name == AUDIT_TOPIC and route.scope == "topic":
            if route.mutates:
                raise PermissionDenied("only the server writes the audit")
            if principal.role < Role.ADMIN:
                raise PermissionDenied("only an admin reads the audit", required="admin")


def _names(route: Route, name: str) -> list[str]:
    """Return the names that a token's prefix must cover: of a topic of a write-ahead log, its namespace too."""
    namespace = namespace_of(name) if route.scope == "topic" else None
    return [name] if namespace is None else [name, namespace]


def _host_name(host: str) -> str:
    """Return the name of a Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    name, _, port = host.rpartition(":")
    return (name if name and port.isdecimal() else host).lower()


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError as error:
        raise InvalidInput("the Origin header is not a URL") from error
