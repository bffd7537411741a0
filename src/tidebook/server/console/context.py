"""The objects that all pages and acts share, and the type of the catalog that lists these."""

from __future__ import annotations

import msgspec

from tidebook.server.console.act import Act
from tidebook.server.console.bulk import BulkActs
from tidebook.server.console.live import LiveView
from tidebook.server.console.page import Page
from tidebook.server.console.survey import Surveyor
from tidebook.server.state import ServerState


class Catalog(msgspec.Struct, frozen=True):
    """All pages, acts and live views by name."""

    pages: dict[str, Page]
    acts: dict[str, Act]
    lives: dict[str, LiveView]


class ConsoleContext:
    """The server's state, the catalog, the survey of the book, and the acts in the background."""

    def __init__(self, state: ServerState, catalog: Catalog) -> None:
        self.state = state
        self.catalog = catalog
        self.surveyor = Surveyor(state.book)
        self.bulk = BulkActs(state.book.clock)
