"""The schema of a file, as a list of upgrade steps."""

from __future__ import annotations

import msgspec


class Schema(msgspec.Struct, frozen=True):
    """The SQL steps of a schema: step i upgrades a file from version i to i + 1. Steps are appended, never changed."""

    name: str
    #: SQLite's `application_id`, which identifies the program that owns a file.
    application_id: int
    steps: tuple[str, ...]

    @property
    def version(self) -> int:
        return len(self.steps)
