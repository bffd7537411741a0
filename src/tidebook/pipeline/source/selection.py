"""The selection of events that the options of a read describe. Pure.

Query filters are not pushed down: Spark 4.2.0 shares one reader between all scans of a DataFrame, so one query's filter
would affect the others (decision 0111). Options belong to the DataFrame, so they do not have this problem.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

INT_MIN, INT_MAX = 0, 2**62


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of a read, all inclusive; None selects everything."""

    topics: frozenset[str] | None = None
    ids: frozenset[str] | None = None
    tag: str | None = None
    seq_nr_from: int = 1
    seq_nr_to: int = INT_MAX
    time_from_ms: int = INT_MIN
    time_to_ms: int = INT_MAX

    def of_topics(self, names: Iterable[str]) -> list[str]:
        """Return the selected topics among `names`."""
        return [name for name in names if self.topics is None or name in self.topics]

    @property
    def narrows(self) -> bool:
        """Return whether `takes` must be checked for each event."""
        return self != Selection(topics=self.topics, tag=self.tag)

    def takes(self, id: str, seq_nr: int, timestamp_ms: int) -> bool:
        """Return whether an event is selected by its id, number and time; the tag is not checked."""
        return (
            self.seq_nr_from <= seq_nr <= self.seq_nr_to
            and self.time_from_ms <= timestamp_ms <= self.time_to_ms
            and (self.ids is None or id in self.ids)
        )
