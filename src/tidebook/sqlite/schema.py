"""The schema of a file, as a list of upgrade steps."""

from __future__ import annotations

import msgspec


class Schema(msgspec.Struct, frozen=True):
    """The SQL steps of a schema: each upgrades a file by one version. Steps are appended, never changed."""

    name: str
    #: SQLite's `application_id`, which identifies the program that owns a file.
    application_id: int
    steps: tuple[str, ...]
    #: The version that the first step creates; older files are refused.
    first_version: int = 1

    @property
    def version(self) -> int:
        return self.first_version - 1 + len(self.steps)
