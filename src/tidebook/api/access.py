"""Roles, and the requests and responses of sign-in, tokens and audit."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

#: The maximum length of a token's name and of its prefix.
TEXT_CHARS_MAX: Final = 200
RoleName = Literal["viewer", "operator", "admin"]


class Role(IntEnum):
    """The rights of a token: each role includes those before it."""

    #: Anyone, even without a token.
    PUBLIC = 0
    #: Read.
    VIEWER = 1
    #: Append, put, claim, retry, write.
    OPERATOR = 2
    #: Delete, purge, drop, start jobs of the pipeline, manage tokens, see masked fields and the audit.
    ADMIN = 3

    @property
    def label(self) -> str:
        """The name of the role in lower case."""
        return _LABELS[self]


_LABELS: Final = tuple(role.name.lower() for role in Role)


class SignInBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The token to sign a browser in with."""

    token: str


class SessionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The signed-in user; a browser sends `csrf_token` as the header X-CSRF-Token with every change."""

    name: str
    role: RoleName
    prefix: str
    expires_at_ms: int | None
    csrf_token: str | None


class TokenBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A token to create."""

    name: Annotated[str, Meta(min_length=1, max_length=TEXT_CHARS_MAX)]
    role: RoleName = "viewer"
    #: The token is valid for topics, queues and namespaces that begin with this text.
    prefix: Annotated[str, Meta(max_length=TEXT_CHARS_MAX)] = ""
    expire_after_s: Annotated[float, Meta(gt=0, le=3_153_600_000)] | None = None


class TokenResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A token without its secret."""

    id: str
    name: str
    role: RoleName
    prefix: str
    created_at_ms: int
    expires_at_ms: int | None
    last_used_at_ms: int | None
    revoked_at_ms: int | None


class NewTokenResponse(TokenResponse, frozen=True, kw_only=True):
    """A new token with its secret, which is shown only here."""

    token: str


class TokensResponse(msgspec.Struct, frozen=True):
    """All tokens, newest first."""

    tokens: list[TokenResponse]


class AuditVerifyResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The result of checking the chains of the audit."""

    chains: int
    entries: int
    findings: list[dict[str, Any]]
