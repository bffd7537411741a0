"""The console as an ASGI application: pages, their JSON twins, acts (forms that change something), and static files."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final
from urllib.parse import quote, unquote

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route as StarletteRoute
from starlette.types import Receive, Scope, Send

from tidebook.api.errors import DeadlineExceeded, MethodNotAllowed, SignInRequired
from tidebook.api.problem import CONTENT_TYPE, internal_problem, problem_of
from tidebook.core.errors import NotFound, OutcomeUnknown, TidebookError, TooLarge
from tidebook.server.browser_sessions import COOKIE
from tidebook.server.console.act import Act, ActResult, Preview
from tidebook.server.console.form_fields import decode_fields, decode_query, given_fields, parse_form
from tidebook.server.console.live import LiveEndpoint, LiveView, send_rows
from tidebook.server.console.page import Page, scope_name
from tidebook.server.console.render import Renderer, link, static_files
from tidebook.server.console.retry_form import STATUSES, RetryForm, retry_form
from tidebook.server.console.view import Catalog, ConsoleContext, View
from tidebook.server.headers import Headers
from tidebook.server.state import ServerState

logger = logging.getLogger("tidebook.server.console")

THEME_COOKIE: Final = "tidebook_theme"
FLASH_COOKIE: Final = "tidebook_flash"
THEMES: Final = ("auto", "light", "dark")
FLASH_CHARS_MAX: Final = 400
SIGN_IN_PATH: Final = "/sign-in"
CHANGED: Final = "Nothing was done: this has changed since it was counted. Read what it does now, then confirm."
#: Allows nothing from other origins, and no inline scripts or styles.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Without any referrer, browsers send the forms of these pages with the origin "null".
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_TYPES: Final = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class Console:
    """The pages of one server."""

    def __init__(self, state: ServerState, catalog: Catalog) -> None:
        self.context = ConsoleContext(state, catalog)
        self._static = static_files()
        self._render = Renderer(self._static)

    @property
    def state(self) -> ServerState:
        """The state of the server."""
        return self.context.state

    async def close(self) -> None:
        """Stop the background tasks."""
        await self.context.bulk.close()
        await self.context.surveyor.close()

    def application(self) -> Starlette:
        """Return the application that serves everything outside the API."""
        routes: list[StarletteRoute] = []
        for page in self.context.catalog.pages.values():
            routes.append(StarletteRoute(page.path, self._endpoint(self._page, page), methods=["GET"]))
            routes.append(StarletteRoute(page.twin, self._endpoint(self._twin, page), methods=["GET"]))
        for act in self.context.catalog.acts.values():
            routes.append(StarletteRoute(act.path, self._endpoint(self._confirm, act), methods=["GET"]))
            routes.append(StarletteRoute(act.path, self._endpoint(self._act, act), methods=["POST"]))
        for live in self.context.catalog.lives.values():
            routes.append(StarletteRoute(live.path, LiveEndpoint(partial(self._live, live))))
        routes.append(StarletteRoute("/static/{version}/{name}", self._file, methods=["GET"]))
        routes.append(StarletteRoute("/{rest:path}", self._missing))
        return Starlette(routes=routes, exception_handlers={405: self._refuse_method})

    # ---- requests

    def _endpoint(self, serve: Callable[[Any, Request, Headers], Any], target: Page | Act) -> Any:
        async def endpoint(request: Request) -> Response:
            headers = Headers(request.scope["headers"])
            as_json, limit_s = serve == self._twin, self.state.settings.request_s
            try:
                async with asyncio.timeout(limit_s):
                    response: Response = await serve(target, request, headers)
            except SignInRequired as error:
                response = self._sign_in(error, target, request, headers, as_json=as_json)
            except TidebookError as error:
                response = self._problem(error, headers, as_json=as_json, target=target, request=request)
            except TimeoutError:
                response = self._problem(late_error(request, limit_s), headers, as_json=as_json)
            except Exception:
                logger.exception("%s failed", target.path)
                response = self._failure(internal_problem(), headers, as_json=as_json)
            return _secured(response)

        return endpoint

    def _sign_in(
        self, error: SignInRequired, target: Page | Act, request: Request, headers: Headers, *, as_json: bool
    ) -> Response:
        """Redirect a browser to the sign-in page, and from there back to the page that it requested."""
        if as_json or request.method != "GET" or target.path == SIGN_IN_PATH:
            back = getattr(request.state, "typed", {}).get("back")
            return self._problem(error, headers, as_json=as_json, back=_local(back))
        where = link(SIGN_IN_PATH, next=_address(request))
        if "hx-request" in request.headers:  # a part of a page, into which htmx would insert the sign-in form
            return Response(status_code=401, headers={"hx-redirect": where})
        return RedirectResponse(where, 303)

    def _require_role(self, target: Page | Act | LiveView, headers: Headers) -> None:
        """Refuse a token without the required role before the rest of the request is parsed."""
        principal = self.state.gate.authenticate("GET", headers)
        if principal.role < target.route.role:
            self.state.gate.authorize(principal, target.route, None)

    def _view(self, target: Page | Act | LiveView, request: Request, headers: Headers, fields: Any) -> View:
        """Authenticate and authorize the request, as the API does, and return the view for its handler."""
        gate = self.state.gate
        principal = gate.authenticate(request.method, headers)
        client = request.client.host if request.client else ""
        gate.authorize(principal, target.route, scope_name(target.route, fields), client)
        return View(
            self.context,
            target,
            principal,
            fields,
            client=client,
            session=headers.cookie_value(COOKIE) or "",
            csrf_token=self._csrf_token(headers),
            theme=_theme(headers),
            flash=unquote(headers.cookie_value(FLASH_COOKIE) or ""),
            last_event_id=headers.last_event_id,
            url=_address(request),
        )

    def _csrf_token(self, headers: Headers) -> str:
        cookie = headers.cookie_value(COOKIE)
        session = None if cookie is None else self.state.sessions.find(cookie)
        return "" if session is None else session.csrf_token

    async def _read(self, page: Page, request: Request, headers: Headers) -> tuple[View, Any]:
        self._require_role(page, headers)
        fields = decode_query(page.query, request.scope["query_string"])
        view = self._view(page, request, headers, fields)
        data = await page.read(view)
        if view.unmask:
            await self._record_unmask(view)
        return view, data

    async def _page(self, page: Page, request: Request, headers: Headers) -> Response:
        view, data = await self._read(page, request, headers)
        response = self._html(page.template, view=view, page=page, data=data)
        if view.flash:
            response.delete_cookie(FLASH_COOKIE)
        return response

    async def _twin(self, page: Page, request: Request, headers: Headers) -> Response:
        _, data = await self._read(page, request, headers)
        return Response(msgspec.json.encode(data, enc_hook=str), media_type="application/json")

    async def _confirm(self, act: Act, request: Request, headers: Headers) -> Response:
        """Show the dry run of an act, with a form to confirm it."""
        self._require_role(act, headers)
        view = self._view(act, request, headers, decode_query(act.form, request.scope["query_string"]))
        if act.preview is None:
            raise MethodNotAllowed("this path only accepts the console's form", allowed=["POST"])
        preview = await act.preview(view)
        return self._confirmation(act, view, preview, back=_local(request.query_params.get("back")), warning="")

    def _confirmation(self, act: Act, view: View, preview: Preview, *, back: str, warning: str) -> Response:
        fields = given_fields(view.fields) | preview.fields
        shown = self._html(
            "confirm.html", view=view, act=act, preview=preview, fields=fields, back=back, warning=warning
        )
        shown.status_code = 409 if warning else 200
        return shown

    async def _act(self, act: Act, request: Request, headers: Headers) -> Response:
        state = self.state
        self._require_role(act, headers)
        form = dict(parse_form(await self._body(request, state.settings.body_limit(act.route.role))))
        request.state.typed = dict(form)
        headers.csrf_token = headers.csrf_token or form.pop("csrf_token", "")
        back, typed, seal = _local(form.pop("back", None)), form.pop("confirm", ""), form.pop("seal", "")
        as_of = form.pop("as_of", "")
        view = self._view(act, request, headers, decode_fields(act.form, form))
        state.audit.check_room()
        if act.preview is not None:
            counted_at_ms, view.as_of_ms = view.as_of_ms, _earlier(as_of, view.as_of_ms)
            view.confirmed = await act.preview(view)
            if view.confirmed.seal != seal:
                view.as_of_ms = counted_at_ms
                return self._confirmation(act, view, await act.preview(view), back=back, warning=CHANGED)
            if view.confirmed.word not in (None, typed):
                warning = f"Nothing was done: the typed text is not “{view.confirmed.word}”."
                return self._confirmation(act, view, view.confirmed, back=back, warning=warning)
        try:
            done = await act.run(view)
        except TidebookError as error:
            if (status := problem_of(error)["status"]) >= 500:  # the change may have been made, fully or in part
                self._record_failure(act, view, status)
            raise
        except BaseException as error:
            self._record_failure(act, view, 504 if isinstance(error, TimeoutError | asyncio.CancelledError) else 500)
            raise
        if done.changed:
            await self._record(act, view, 200)
        return self._response(act, view, done, back)

    def _response(self, act: Act, view: View, done: ActResult, back: str) -> Response:
        if done.secret is not None:
            return self._html("secret.html", view=view, act=act, done=done, back=back)
        response = RedirectResponse(done.to or back, 303, headers=dict(done.headers))
        text = quote(done.message[:FLASH_CHARS_MAX])
        response.set_cookie(FLASH_COOKIE, text, max_age=30, httponly=True, samesite="strict", secure=self.state.tls)
        return response

    async def _record(self, act: Act, view: View, status: int) -> None:
        """Record an act in the audit, as the API records its route."""
        audit, route, target = self.state.audit, act.route, _target(act, view)
        if route.destructive:
            await audit.record_durably(view.principal, view.client, route.name, target, status)
        else:
            audit.record(view.principal, view.client, route.name, target, status)

    def _record_failure(self, act: Act, view: View, status: int) -> None:
        """Record an act that failed, without waiting for the audit: it may depend on the component that failed."""
        self.state.audit.record(view.principal, view.client, act.route.name, _target(act, view), status)

    async def _live(self, live: LiveView, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the rows of a live view; a refused request gets a problem document, as in the API."""
        request, headers = Request(scope, receive), Headers(scope["headers"])
        state, limit_s = self.state, self.state.settings.request_s
        try:
            async with asyncio.timeout(limit_s):
                self._require_role(live, headers)
                view = self._view(live, request, headers, decode_query(live.query, scope["query_string"]))
                rows = await live.follow(view, lambda row: self._row(live, view, row))
                if view.unmask:
                    await self._record_unmask(view)
            state.slots.take(view.principal.id)
        except (TidebookError, TimeoutError) as error:
            problem = late_error(request, limit_s) if isinstance(error, TimeoutError) else error
            await _secured(self._problem(problem, headers, as_json=True))(scope, receive, send)
            return
        try:
            session = state.gate.session_of(headers)
            await send_rows(state, view.principal.id, session, rows, receive, send, SECURITY_HEADERS)
        finally:
            state.slots.release(view.principal.id)

    def _row(self, live: LiveView, view: View, row: Any) -> bytes:
        """Return a row as one line, as the data of a server-sent event requires."""
        return b" ".join(self._render(live.template, view=view, row=row).splitlines())

    async def _record_unmask(self, view: View) -> None:
        name = view.target.route.name
        await self.state.audit.record_durably(view.principal, view.client, name, view.url, 200, unmask=True)

    async def _body(self, request: Request, limit: int) -> bytes:
        parts, size = list[bytes](), 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                raise TooLarge("the form", size_bytes=size, limit_bytes=limit)
            parts.append(part)
        return b"".join(parts)

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        body = self._static.get(name)
        kind = _TYPES.get(name.rpartition(".")[2])
        if body is None or kind is None:
            return await self._missing(request)
        forever = {"cache-control": "public, max-age=31536000, immutable"}
        return _secured(Response(body, media_type=kind, headers=forever))

    async def _missing(self, request: Request) -> Response:
        return self._refuse(request, NotFound(f"there is no page {request.scope['path'][:200]!r} here"))

    async def _refuse_method(self, request: Request, _: Exception) -> Response:
        error = MethodNotAllowed(f"{request.method[:20]} is not allowed here: use GET", allowed=["GET"])
        response = self._refuse(request, error)
        response.headers["allow"] = "GET"
        return response

    def _refuse(self, request: Request, error: TidebookError) -> Response:
        as_json = request.scope["path"].endswith(".json")
        return _secured(self._problem(error, Headers(request.scope["headers"]), as_json=as_json))

    # ---- responses

    def _html(self, template: str, **context: Any) -> Response:
        return Response(self._render(template, **context), media_type="text/html")

    def _problem(
        self,
        error: TidebookError,
        headers: Headers,
        *,
        as_json: bool,
        target: Page | Act | None = None,
        request: Request | None = None,
        back: str = "/",
    ) -> Response:
        problem, form = problem_of(error), None
        if target is not None and request is not None and problem["status"] in STATUSES:
            typed = getattr(request.state, "typed", None) or dict(request.query_params)
            form = retry_form(target, request.method, typed)
        return self._failure(problem, headers, as_json=as_json, form=form, back=back)

    def _failure(
        self,
        problem: dict[str, Any],
        headers: Headers,
        *,
        as_json: bool,
        form: RetryForm | None = None,
        back: str = "/",
    ) -> Response:
        if as_json:
            return Response(msgspec.json.encode(problem), problem["status"], media_type=CONTENT_TYPE)
        context = {"form": form, "back": back, "csrf_token": self._csrf_token(headers), "theme": _theme(headers)}
        body = self._render("problem.html", problem=problem, **context)
        return Response(body, problem["status"], media_type="text/html")


def _secured(response: Response) -> Response:
    """Return a response with the security headers; unless it says otherwise, browsers may not store it."""
    response.headers.setdefault("cache-control", "no-store")
    response.headers.update(SECURITY_HEADERS)
    return response


def _target(act: Act, view: View) -> str:
    """Return what the audit records of an act: its path and fields, without secrets and payloads."""
    if act.route.returns_secret:
        return act.path
    return link(
        act.path, **{name: value for name, value in given_fields(view.fields).items() if name not in act.content}
    )


def _earlier(given: str, now_ms: int) -> int:
    """Return the time of a dry run, as its form has it; a time in the future becomes the present."""
    return min(now_ms, int(given)) if given.isascii() and given.isdecimal() and len(given) < 20 else now_ms


def _theme(headers: Headers) -> str:
    theme = headers.cookie_value(THEME_COOKIE)
    return theme if theme in THEMES else "auto"


def late_error(request: Request, limit_s: float) -> TidebookError:
    """Return the error for a request that was cancelled at its deadline; an act may have happened nevertheless."""
    if request.method == "POST":
        return OutcomeUnknown(
            f"the request was cancelled after {limit_s:g} s, and its change may have happened: check whether it has"
        )
    return DeadlineExceeded(f"the request took longer than {limit_s:g} s: request less data", deadline_s=limit_s)


def _address(request: Request) -> str:
    """Return the path and the query string of a request."""
    query = request.scope["query_string"].decode("latin-1")
    path = quote(request.scope["path"])
    return f"{path}?{query}" if query else path


def _local(address: str | None) -> str:
    """Return an address of this console; any other becomes the overview, which prevents open redirects."""
    if not address or not address.startswith("/") or address.startswith("//") or "\\" in address:
        return "/"
    return address if address.isprintable() and address.isascii() else "/"
