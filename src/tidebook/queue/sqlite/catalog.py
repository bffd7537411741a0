"""The catalog of queues in SQLite: their settings and the declarations of their fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tidebook.queue.port import QueueRef, QueueSettings
from tidebook.runtime.clock import Clock
from tidebook.sqlite.writer import WriteTransaction

_FIND = "SELECT id, name, settings FROM queue WHERE name = ?"

_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(QueueSettings).decode


class QueueRequest(msgspec.Struct, frozen=True, gc=False):
    """The name of a queue to open, and the settings to store with it; None keeps the stored ones."""

    name: str
    settings: QueueSettings | None


def ref_of(row: tuple[int, str, bytes]) -> QueueRef:
    """Return the queue of a row (id, name, settings)."""
    id, name, settings = row
    return QueueRef(id, name, _decode(settings))


class QueueCatalog:
    """Creates queues and numbers their declarations, in the writer thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def open(self, session: WriteTransaction, requests: Sequence[QueueRequest]) -> list[QueueRef]:
        """Create or find queues; settings that are given replace the stored ones."""
        execute = session.connection.execute
        refs = []
        for request in requests:
            settings = _encode(request.settings or QueueSettings())
            execute("INSERT INTO queue (name, settings) VALUES (?, ?) ON CONFLICT DO NOTHING", (request.name, settings))
            if request.settings is not None:
                execute("UPDATE queue SET settings = ? WHERE name = ?", (settings, request.name))
            found: Any = execute(_FIND, (request.name,)).fetchone()
            refs.append(ref_of(found))
        return refs

    def declare(self, session: WriteTransaction, declared: Sequence[tuple[int, bytes]]) -> list[int]:
        """Return the number of each declaration; a known declaration keeps its number."""
        execute, numbers = session.connection.execute, []
        for queue, fields in declared:
            found: Any = execute(
                "SELECT max(format), max(format) FILTER (WHERE fields = ?) FROM declaration WHERE queue = ?",
                (fields, queue),
            ).fetchone()
            newest, number = found
            if number is None:
                number = (newest or 0) + 1
                execute("INSERT INTO declaration VALUES (?, ?, ?, ?)", (queue, number, fields, self._clock.now_ms()))
            numbers.append(number)
        return numbers
