"""The tokens: create, list and revoke them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tidebook.api.access import RoleName, TokenResponse
from tidebook.api.routes import BY_NAME
from tidebook.core.errors import NotFound
from tidebook.server.console.act import ActResult, Preview, api_act
from tidebook.server.console.page import Page
from tidebook.server.console.view import View

DAY_S = 86_400


class TokensData(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[TokenResponse]
    open: bool
    now_ms: int


async def tokens(view: View) -> TokensData:
    return TokensData(tokens=view.state.tokens.list(), open=view.state.gate.is_open, now_ms=view.now_ms)


class NewTokenForm(msgspec.Struct, frozen=True):
    """A token to create."""

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    role: RoleName = "viewer"
    prefix: Annotated[str, Meta(max_length=200)] = ""
    days: Annotated[float, Meta(gt=0, le=36_500)] | None = None


async def create(view: View) -> ActResult:
    """Create a token, and show its secret once."""
    form = view.fields
    expire_after_s = None if form.days is None else form.days * DAY_S
    made = await view.state.tokens.create(form.name, form.role, prefix=form.prefix, expire_after_s=expire_after_s)
    return ActResult(message=f"Token {made.name} is created.", secret=made.token)


class RevokeForm(msgspec.Struct, frozen=True):
    token: str


async def preview_revoke(view: View) -> Preview:
    """Name the token that would be revoked."""
    found = next((each for each in view.state.tokens.list() if each.id == view.fields.token), None)
    if found is None:
        raise NotFound(f"there is no token {view.fields.token[:40]!r}")
    text = f"This revokes 1 token, {found.name} ({found.role}). Clients that use it are refused from now on."
    return Preview(text=text, count=1, word=found.name, members=[found.id])


async def revoke(view: View) -> ActResult:
    await view.state.tokens.revoke(view.fields.token)
    return ActResult(message="The token is revoked.", to="/tokens")


PAGES = (Page("tokens", BY_NAME["access.tokens"], tokens),)
ACTS = (
    api_act("access.create_token", "Create token", create, NewTokenForm),
    api_act("access.revoke_token", "Revoke token", revoke, RevokeForm, preview_revoke),
)
