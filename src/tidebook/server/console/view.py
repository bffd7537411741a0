"""One request for a page or an act, as its handler sees it, and the objects that all requests share."""

from __future__ import annotations

from typing import Any

import msgspec

from tidebook.api.access import Role
from tidebook.api.errors import PermissionDenied
from tidebook.server.audit_entry import AUDIT_TOPIC
from tidebook.server.console.act import Act, Preview
from tidebook.server.console.bulk import BulkActs
from tidebook.server.console.form_fields import given_fields
from tidebook.server.console.live import LiveView
from tidebook.server.console.page import Page
from tidebook.server.console.render import link
from tidebook.server.console.survey import Surveyor
from tidebook.server.masking import Mask
from tidebook.server.principal import Principal
from tidebook.server.state import ServerState
from tidebook.wiring.book import Book


class Catalog(msgspec.Struct, frozen=True):
    """All pages, acts and live views by name."""

    pages: dict[str, Page]
    acts: dict[str, Act]
    lives: dict[str, LiveView]


class ConsoleContext:
    """The server's state, the catalog, the survey of the book, and the acts that run in the background."""

    def __init__(self, state: ServerState, catalog: Catalog) -> None:
        self.state = state
        self.catalog = catalog
        self.surveyor = Surveyor(state.book)
        self.bulk = BulkActs(state.book.clock)


class View:
    """The request of a page: its user, its parameters, and the rights to see data."""

    def __init__(
        self,
        context: ConsoleContext,
        target: Page | Act | LiveView,
        principal: Principal,
        fields: Any,
        *,
        client: str = "",
        session: str = "",
        csrf_token: str = "",
        theme: str = "auto",
        flash: str = "",
        last_event_id: str | None = None,
        url: str = "/",
    ) -> None:
        self.context = context
        self.target = target
        self.principal = principal
        #: The decoded query of a page, or form of an act.
        self.fields = fields
        self.client = client
        #: The cookie of the browser's session.
        self.session = session
        self.csrf_token = csrf_token
        self.theme = theme
        #: The result of the last act.
        self.flash = flash
        #: The id of the last row of a live view that the browser has received.
        self.last_event_id = last_event_id
        #: The path and the query of the page.
        self.url = url
        #: The time of the dry run: entries that come later are neither counted nor affected.
        self.as_of_ms = self.now_ms
        #: The dry run that was confirmed: an act affects nothing that it did not count.
        self.confirmed = Preview(text="", count=0)
        self.unmask: bool = getattr(fields, "unmask", False)
        if self.unmask and not self.is_admin:
            raise PermissionDenied("only an admin may see masked fields: leave unmask out", required="admin")

    @property
    def state(self) -> ServerState:
        """The state of the server."""
        return self.context.state

    @property
    def book(self) -> Book:
        """The book that is served."""
        return self.context.state.book

    @property
    def now_ms(self) -> int:
        """The time of the book's clock."""
        return self.book.clock.now_ms()

    @property
    def is_admin(self) -> bool:
        """Whether the token is an admin's; only an admin sees masked fields and the topic of the audit."""
        return self.principal.role >= Role.ADMIN

    @property
    def may_sign_out(self) -> bool:
        """Whether a user is signed in."""
        return bool(self.principal.id)

    def may(self, name: str) -> bool:
        """Return whether the token allows an act or a page; pages hide the others."""
        route = (self.context.catalog.acts.get(name) or self.context.catalog.pages[name]).route
        if self.principal.role < route.role:
            return False
        if route.mutates and route.scope == "topic" and getattr(self.fields, "topic", None) == AUDIT_TOPIC:
            return False  # only the server writes the audit
        return not (self.principal.prefix and route.scope == "book")

    def may_see_topic(self, topic: str) -> bool:
        """Return whether the token may open the page of a topic."""
        return self.principal.may_see(topic) and (topic != AUDIT_TOPIC or self.is_admin)

    def path_of(self, name: str) -> str:
        """Return the path of a page."""
        return self.context.catalog.pages[name].path

    @property
    def twin(self) -> str:
        """The address of this page's data as JSON."""
        assert isinstance(self.target, Page)
        return link(self.target.twin, **given_fields(self.fields))

    @property
    def may_see_history(self) -> bool:
        """Whether the token may see the metrics, which concern the whole book."""
        return not self.principal.prefix

    def act(self, name: str) -> Act:
        """Return an act by name."""
        return self.context.catalog.acts[name]

    def mask(self, name: str) -> Mask | None:
        """Return the mask of a topic or queue for this request; None if nothing is hidden."""
        return None if self.unmask else self.state.masks.of(name)

    def is_masked(self, name: str) -> bool:
        """Return whether a rule hides something of a topic or queue, even if this request shows it."""
        return self.state.masks.of(name) is not None

    def here(self, **changes: Any) -> str:
        """Return the address of this page with some parameters changed, or left out if they are None."""
        return link(self.target.path, **{**given_fields(self.fields), **changes})
