"""Wake a relay by NOTIFY; publishers notify only while a relay asks for it."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg

from tidebook.core.errors import Unavailable

_ASLEEP = (
    "INSERT INTO kafka_wake (relay, asleep_until) VALUES (%s, clock_timestamp() + %s * interval '1 second') "
    "ON CONFLICT (relay) DO UPDATE SET asleep_until = excluded.asleep_until"
)
#: Deletes the rows of relays that were killed.
_CLEAN = "DELETE FROM kafka_wake WHERE asleep_until < clock_timestamp() - interval '1 minute'"


class PostgresListener:
    """A connection that listens. `asleep` and `wait` are called by one thread."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        connection.execute("SET synchronous_commit TO off")
        connection.execute(_CLEAN)
        connection.execute("LISTEN tidebook_outbox")
        self._schema = str(connection.execute("SELECT current_schema()").fetchone()[0])  # type: ignore[index]

    def asleep(self, relay: bytes, seconds: float) -> None:
        """Ask publishers to notify for so many seconds; 0 withdraws the request."""
        try:
            if seconds > 0:
                self._connection.execute(_ASLEEP, (UUID(bytes=relay), seconds))
            else:
                self._connection.execute("DELETE FROM kafka_wake WHERE relay = %s", (UUID(bytes=relay),))
        except psycopg.Error as error:
            raise Unavailable(f"PostgreSQL: {error}") from error

    def wait(self, timeout_s: float) -> bool:
        """Wait for a notification; return False on timeout."""
        try:
            notified = False
            for notification in self._connection.notifies(timeout=timeout_s, stop_after=1):
                notified = notified or notification.payload == self._schema
            return notified
        except psycopg.Error as error:
            raise Unavailable(f"PostgreSQL: {error}") from error

    def close(self) -> None:
        """Stop listening."""
        self._connection.close()
