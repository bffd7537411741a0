"""What every journal must do, whatever log and store it stands on.

class TestMyJournal(JournalContract):
    @pytest.fixture
    def book_factory(self, tmp_path):
        return lambda **journal: open_my_book(tmp_path, journal)  # each time on the same data
"""

from __future__ import annotations

from tidebook.testing.conformance.journal_appending import AppendingCases
from tidebook.testing.conformance.journal_bad_input import BadInputCases
from tidebook.testing.conformance.journal_base import BookFactory
from tidebook.testing.conformance.journal_lives import LivesCases
from tidebook.testing.conformance.journal_racing import RacingCases
from tidebook.testing.conformance.journal_reading import ReadingCases

__all__ = ["BookFactory", "JournalContract"]


class JournalContract(AppendingCases, ReadingCases, LivesCases, RacingCases, BadInputCases):
    """Subclass it, give `book_factory`."""
