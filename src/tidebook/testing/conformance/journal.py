"""The conformance suite of journals, for any log and store. An adapter's tests subclass it:

    class TestMyJournal(JournalContract):
        @pytest.fixture
        def book_factory(self, tmp_path):
            return lambda **journal: open_my_book(tmp_path, journal)

Each call of the factory opens another book on the same data.
"""

from __future__ import annotations

from tidebook.testing.conformance.journal_appending import AppendingCases
from tidebook.testing.conformance.journal_bad_input import BadInputCases
from tidebook.testing.conformance.journal_base import BookFactory
from tidebook.testing.conformance.journal_lifecycle import LifecycleCases
from tidebook.testing.conformance.journal_racing import RacingCases
from tidebook.testing.conformance.journal_reading import JournalReadingCases

__all__ = ["BookFactory", "JournalContract"]


class JournalContract(AppendingCases, JournalReadingCases, LifecycleCases, RacingCases, BadInputCases):
    """Subclass it and provide the fixture `book_factory`."""
