"""What the tables of a file are, version by version."""

from __future__ import annotations

import msgspec


class Schema(msgspec.Struct, frozen=True):
    """Step i brings a file from version i to i + 1; the first one makes it. Steps are added, never changed."""

    name: str
    #: SQLite's mark of who owns a file.
    application_id: int
    steps: tuple[str, ...]

    @property
    def version(self) -> int:
        return len(self.steps)
