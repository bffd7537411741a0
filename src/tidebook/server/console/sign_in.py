"""Sign a browser in and out."""

from __future__ import annotations

import msgspec

from tidebook.api.errors import SignInRequired
from tidebook.server.console.act import ActResult, api_act
from tidebook.server.console.page import Page
from tidebook.server.console.routes import SIGN_IN_PAGE
from tidebook.server.console.view import View


class SignInQuery(msgspec.Struct, frozen=True):
    """The page to show after the sign-in."""

    next: str = "/"


class SignInForm(msgspec.Struct, frozen=True):
    """The token that `tidebook token create` printed."""

    token: str = ""


class SignInData(msgspec.Struct, frozen=True):
    #: Whether this server accepts requests without a token.
    open: bool
    next: str


async def page(view: View) -> SignInData:
    return SignInData(view.state.gate.is_open, view.fields.next)


async def sign_in(view: View) -> ActResult:
    """Start a session."""
    state = view.state
    found = state.tokens.find(view.fields.token.strip())
    if found is None:
        raise SignInRequired("the token is unknown, revoked or expired: create one with 'tidebook token create'")
    view.principal = found
    value, _ = state.sessions.begin(found.id)
    cookie = state.sessions.cookie(value, secure=state.tls).decode()
    return ActResult(message=f"Signed in as {found.name}.", headers=(("set-cookie", cookie),))


async def sign_out(view: View) -> ActResult:
    """End the session."""
    state = view.state
    state.sessions.end(view.session)
    cookie = state.sessions.cookie("", secure=state.tls).decode()
    return ActResult(message="Signed out.", to="/sign-in", headers=(("set-cookie", cookie),))


PAGES = (Page("sign_in", SIGN_IN_PAGE, page, SignInQuery),)
ACTS = (
    api_act("access.sign_in", "Sign in", sign_in, SignInForm),
    api_act("access.sign_out", "Sign out", sign_out),
)
