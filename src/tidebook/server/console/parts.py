"""The objects that all pages share: the server's state, the catalog of pages and acts, and the survey of the book."""

from __future__ import annotations

from tidebook.server.console.bulk import BulkActs
from tidebook.server.console.page import Catalog
from tidebook.server.console.survey import Surveyor
from tidebook.server.state import ServerState


class Parts:
    """The parts of one console."""

    def __init__(self, state: ServerState, catalog: Catalog) -> None:
        self.state = state
        self.catalog = catalog
        self.surveyor = Surveyor(state.book)
        self.bulk = BulkActs(state.book.clock)
