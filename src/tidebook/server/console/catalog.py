"""All pages and acts of the console."""

from __future__ import annotations

from tidebook.server.console import (
    audit,
    doctor,
    event,
    journal,
    journal_acts,
    outbox,
    overview,
    pipeline,
    queue_acts,
    queues,
    settings,
    sign_in,
    tags,
    tokens,
    topics,
    wal,
)
from tidebook.server.console.console import Console
from tidebook.server.console.view import Catalog
from tidebook.server.state import ServerState

PAGES = (
    *overview.PAGES,
    *topics.PAGES,
    *journal.PAGES,
    *event.PAGES,
    *tags.PAGES,
    *queues.PAGES,
    *queue_acts.PAGES,
    *outbox.PAGES,
    *wal.PAGES,
    *pipeline.PAGES,
    *audit.PAGES,
    *tokens.PAGES,
    *settings.PAGES,
    *doctor.PAGES,
    *sign_in.PAGES,
)
ACTS = (
    *topics.ACTS,
    *journal_acts.ACTS,
    *tags.ACTS,
    *queue_acts.ACTS,
    *outbox.ACTS,
    *wal.ACTS,
    *pipeline.ACTS,
    *tokens.ACTS,
    *sign_in.ACTS,
)
LIVES = (*journal.LIVES, *tags.LIVES)
CATALOG = Catalog(
    {page.name: page for page in PAGES}, {act.name: act for act in ACTS}, {live.name: live for live in LIVES}
)


def new_console(state: ServerState) -> Console:
    """Return the console of a server."""
    return Console(state, CATALOG)
