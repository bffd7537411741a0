"""The conformance suite of logs. An adapter's tests subclass it:

    class TestMyLog(LogContract):
        indexed_by_key = False
        end_is_linearizable = True

        @pytest.fixture
        def open_log(self, tmp_path):
            return lambda: open_my_log(tmp_path)

Each call of `open_log` returns an async context manager of another log on the same data.
"""

from __future__ import annotations

from tidebook.log.port import Log
from tidebook.testing.conformance.log_base import OpenLog
from tidebook.testing.conformance.log_reading import LogReadingCases
from tidebook.testing.conformance.log_topics import TopicCases
from tidebook.testing.conformance.log_writing import WritingCases

__all__ = ["LogContract", "OpenLog"]


class LogContract(TopicCases, WritingCases, LogReadingCases):
    """Subclass it, declare the two capabilities, and provide the fixture `open_log`."""

    async def test_the_declared_capabilities_are_those_of_the_log(self, log: Log) -> None:
        assert (log.indexed_by_key, log.end_is_linearizable) == (self.indexed_by_key, self.end_is_linearizable)
