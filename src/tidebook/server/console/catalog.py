"""All pages and acts of the console."""

from __future__ import annotations

from tidebook.server.console import event, journal, overview, sign_in, topics
from tidebook.server.console.console import Console
from tidebook.server.console.page import Catalog
from tidebook.server.state import ServerState

PAGES = (*overview.PAGES, *topics.PAGES, *journal.PAGES, *event.PAGES, *sign_in.PAGES)
ACTS = (*topics.ACTS, *journal.ACTS, *sign_in.ACTS)
LIVES = (*journal.LIVES,)
CATALOG = Catalog(
    {page.name: page for page in PAGES}, {act.name: act for act in ACTS}, {live.name: live for live in LIVES}
)


def new_console(state: ServerState) -> Console:
    """Return the console of a server."""
    return Console(state, CATALOG)
