"""The outbox on PostgreSQL, in as few round trips as possible: one for a lock, two for a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import psycopg
from psycopg import errors

from tidebook.core.errors import InvalidInput, TidebookError, Unavailable
from tidebook.outbox.scan_floor import ScanFloors
from tidebook.outbox.settings import OutboxSettings
from tidebook.outbox.sql import SQL, SqlStatement, StoreStatements, runs
from tidebook.outbox.store import OutboxDatabase, OutboxStore
from tidebook.postgres.connect import CONNECT_S_MAX, BoundedConnection, plain_url, session_settings
from tidebook.postgres.errors import one_line

#: How long a statement may wait for a row that another transaction has locked.
LOCK_MS_MAX = 2_000
_STATEMENTS = StoreStatements(SQL["postgresql"])

# Two index probes per topic, however many rows wait: is there a row above its floor, and is there a topic between it
# and the next one? DISTINCT would read every row.
TOPICS_WAITING = f"""\
WITH known AS (
    SELECT topic, lead(topic, 1, '~') OVER (ORDER BY topic) AS next
    FROM (SELECT topic FROM kafka_topic_info UNION ALL SELECT '') names
)
SELECT i.topic FROM kafka_topic_info i LEFT JOIN
    unnest(%s::text[], %s::bigint[], %s::bigint[]) AS f(topic, floor, rewinds) USING (topic, rewinds)
WHERE {_STATEMENTS.lockable}
AND EXISTS (SELECT 1 FROM kafka_messages m WHERE m.topic = i.topic AND m.id > coalesce(f.floor, 0))
UNION ALL
SELECT fresh.topic FROM known k CROSS JOIN LATERAL (
    SELECT m.topic FROM kafka_messages m WHERE m.topic > k.topic AND m.topic < k.next ORDER BY m.topic LIMIT 1
) fresh
UNION
{_STATEMENTS.topics_with_due}"""

#: Identifies the table's incarnation: it changes when the server restarts or the table is created again or rewritten.
_INCARNATION = """\
SELECT pg_postmaster_start_time(), current_database(), current_schema(),
to_regclass('kafka_messages')::oid, pg_relation_filenode(to_regclass('kafka_messages'))"""

_ASLEEP = (
    "INSERT INTO kafka_wake (relay, asleep_until) VALUES (%s, clock_timestamp() + %s * interval '1 second') "
    "ON CONFLICT (relay) DO UPDATE SET asleep_until = excluded.asleep_until"
)
#: Deletes the rows of relays that were killed.
_CLEAN = "DELETE FROM kafka_wake WHERE asleep_until < clock_timestamp() - interval '1 minute'"


class PostgresOutboxStore(OutboxStore):
    """A connection in autocommit mode. Only the commits that open a session or park messages wait for the disk.

    Transactions run in psycopg's pipeline mode: statements are sent without waiting for the results of earlier ones.
    """

    dialect = "postgresql"

    def __init__(self, connection: psycopg.Connection[Any], floors: ScanFloors, settings: OutboxSettings) -> None:
        super().__init__(settings, floors)
        self._connection = connection
        [[synchronous_commit]] = self._rows("SHOW synchronous_commit")
        if synchronous_commit == "off":  # a session lost after its messages were sent would send them twice
            self._execute("SET synchronous_commit TO on")
        # Every statement uses an index; stale statistics must not make the planner choose otherwise.
        for option in ("enable_seqscan", "enable_bitmapscan", "enable_sort", "jit"):
            self._execute(f"SET {option} TO off")
        self._execute("SET plan_cache_mode TO force_generic_plan")  # planning took longer than execution
        # A relay that is stopped inside a transaction must not keep the topic's row locked.
        self._execute(f"SET idle_in_transaction_session_timeout TO {max(settings.lock_limit_ms, 1)}")

    def topics_waiting(self) -> list[str]:
        limits = (self._lock_limit_ms, self._lock_limit_ms)
        return [topic for (topic,) in self._rows(TOPICS_WAITING, (*self._floors.known(), *limits))]

    def close(self) -> None:
        self._connection.close()

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> psycopg.Cursor[Any]:
        with _translated():
            return self._connection.execute(sql, parameters or None, binary=True)

    @contextmanager
    def _transaction(self, *, durable: bool) -> Iterator[None]:
        with _translated(), self._connection.pipeline(), self._connection.transaction():
            if not durable:  # this commit need not wait for the disk: if a crash loses it, a scan restores it
                self._connection.execute("SET LOCAL synchronous_commit TO off")
            yield

    def _uuid(self, value: bytes) -> UUID:
        return UUID(bytes=value)

    def _ids(self, ids: Sequence[int]) -> SqlStatement:
        """Return a condition whose text does not depend on the ids, so that its plan is reused."""
        spans = runs(sorted(ids))
        if len(spans) == 1:
            return SqlStatement("id BETWEEN %s AND %s", spans[0])
        return SqlStatement("id = ANY(%s)", (sorted(ids),))


class PostgresListener:
    """A connection that listens for NOTIFY, which publishers send only while a relay asks for it."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        connection.execute("SET synchronous_commit TO off")
        connection.execute(_CLEAN)
        connection.execute("LISTEN tidebook_outbox")
        self._schema = str(connection.execute("SELECT current_schema()").fetchone()[0])  # type: ignore[index]

    def asleep(self, relay: bytes, seconds: float) -> None:
        with _translated():
            if seconds > 0:
                self._connection.execute(_ASLEEP, (UUID(bytes=relay), seconds))
            else:
                self._connection.execute("DELETE FROM kafka_wake WHERE relay = %s", (UUID(bytes=relay),))

    def wait(self, timeout_s: float) -> bool:
        with _translated():
            received = list(self._connection.notifies(timeout=timeout_s, stop_after=1))
        return any(notification.payload == self._schema for notification in received)

    def close(self) -> None:
        self._connection.close()


class PostgresOutboxDatabase(OutboxDatabase):
    """Opens connections to one database."""

    def __init__(self, url: str, settings: OutboxSettings) -> None:
        self._url = plain_url(url)
        self._settings = settings
        self._floors = ScanFloors()

    def connect(self) -> PostgresOutboxStore:
        connection = self._open("tidebook-outbox")
        with _translated():
            self._floors.reset_unless(connection.execute(_INCARNATION).fetchone())
        return PostgresOutboxStore(connection, self._floors, self._settings)

    def listen(self) -> PostgresListener:
        with _translated():
            return PostgresListener(self._open("tidebook-outbox-listener"))

    def _open(self, name: str) -> psycopg.Connection[Any]:
        with _translated():
            return BoundedConnection.connect(
                self._url,
                autocommit=True,
                connect_timeout=CONNECT_S_MAX,
                application_name=name,
                options=session_settings(self._url, f"-c lock_timeout={LOCK_MS_MAX}"),
                keepalives_idle=15,
                keepalives_interval=5,
                keepalives_count=3,
                tcp_user_timeout=30_000,
                prepare_threshold=2,
            )


@contextmanager
def _translated() -> Iterator[None]:
    """Raise psycopg's errors as Tidebook's. A commit with an unknown outcome is safe: the next lock resolves it."""
    try:
        yield
    except psycopg.Error as error:
        raise _translate(error) from error


def _translate(error: psycopg.Error) -> TidebookError:
    text = one_line(error)
    if isinstance(error, errors.UndefinedTable | errors.UndefinedColumn):
        reason = error.diag.message_primary or text  # without the statement, which `text` quotes
        return Unavailable(f"the outbox's tables are missing or old ({reason}): run 'tidebook outbox migrate'")
    if isinstance(error, errors.InvalidSchemaName):
        return InvalidInput(f"PostgreSQL: {text}: create the schema that search_path names")
    if isinstance(error, errors.InvalidPassword | errors.InvalidCatalogName | errors.InsufficientPrivilege):
        return InvalidInput(f"PostgreSQL refused: {text}: check the URL and the rights of its user")
    return Unavailable(f"PostgreSQL: {text}")
