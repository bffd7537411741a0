"""Handlers of sign-in, tokens and the audit."""

from __future__ import annotations

import msgspec

from tidebook.api.access import AuditVerifyResponse, NewTokenResponse, SessionResponse, TokensResponse
from tidebook.api.errors import SignInRequired
from tidebook.server.audit_check import check_audit
from tidebook.server.browser_sessions import COOKIE
from tidebook.server.call import Call, Handler
from tidebook.server.principal import Principal
from tidebook.server.responses import Reply
from tidebook.server.tokens import role_name


def _session(principal: Principal, csrf_token: str | None) -> SessionResponse:
    return SessionResponse(
        name=principal.name,
        role=role_name(principal.role),
        prefix=principal.prefix,
        expires_at_ms=principal.expires_at_ms,
        csrf_token=csrf_token,
    )


async def sign_in(call: Call) -> Reply:
    """Sign a browser in."""
    state = call.state
    found = state.tokens.find(call.body.token)
    if found is None:
        raise SignInRequired("the token is unknown, revoked or expired: create one with 'tidebook token create'")
    call.principal = found
    value, session = state.sessions.begin(found.id)
    cookie = state.sessions.cookie(value, secure=state.tls)
    return Reply(_session(found, session.csrf_token), 200, ((b"set-cookie", cookie),))


async def session(call: Call) -> SessionResponse:
    """Return the name, the role and the CSRF token of the signed-in sender."""
    cookie = call.headers.cookie_value(COOKIE)
    found = None if cookie is None else call.state.sessions.find(cookie)
    return _session(call.principal, None if found is None else found.csrf_token)


async def sign_out(call: Call) -> Reply:
    """Sign a browser out, and end its live streams."""
    cookie = call.headers.cookie_value(COOKIE)
    if cookie is not None:
        call.state.sessions.end(cookie)
        call.state.live.end_unless(call.state.gate.is_current)
    removed = call.state.sessions.cookie("", secure=call.state.tls)
    return Reply(None, 204, ((b"set-cookie", removed),))


async def tokens(call: Call) -> TokensResponse:
    """List the tokens."""
    return TokensResponse(call.state.tokens.list())


async def create_token(call: Call) -> NewTokenResponse:
    """Create a token."""
    body = call.body
    return await call.state.tokens.create(body.name, body.role, prefix=body.prefix, expire_after_s=body.expire_after_s)


async def revoke_token(call: Call) -> None:
    """Revoke a token."""
    await call.state.tokens.revoke(call.parameters[0])


async def audit_verify(call: Call) -> AuditVerifyResponse:
    """Check the chains of the audit."""
    report = await check_audit(call.book, call.state.database)
    findings = [msgspec.structs.asdict(each) for each in report.findings]
    return AuditVerifyResponse(chains=report.chains, entries=report.entries, findings=findings)


HANDLERS: dict[str, Handler] = {
    "access.sign_in": sign_in,
    "access.session": session,
    "access.sign_out": sign_out,
    "access.tokens": tokens,
    "access.create_token": create_token,
    "access.revoke_token": revoke_token,
    "access.audit_verify": audit_verify,
}
