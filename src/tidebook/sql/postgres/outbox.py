"""The outbox on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import psycopg
from psycopg import errors

from tidebook.core.errors import InvalidInput, TidebookError, Unavailable
from tidebook.sql.migrate.outbox import create_statements
from tidebook.sql.port.outbox import Batch, BatchLimit, Choose, Chosen, Finished, Hold, NewSession, Waiting
from tidebook.sql.port.outbox_ids import pack_ids
from tidebook.sql.postgres import outbox_statements as sql
from tidebook.sql.postgres.bounded import BoundedConnection
from tidebook.sql.postgres.connect import plain_url
from tidebook.sql.postgres.outbox_floor import Floors
from tidebook.sql.postgres.outbox_listener import PostgresListener
from tidebook.sql.queries.outbox_operation import OperatedOutboxStore
from tidebook.sql.queries.outbox_store import Row, fenced, more_waits

CONNECT_S_MAX = 10
#: How long a statement may wait for a row that somebody else's transaction has changed.
LOCK_MS_MAX = 2_000


class PostgresOutboxStore(OperatedOutboxStore):
    """One connection in autocommit. Only the opening of a session waits for the disk."""

    dialect = "postgresql"

    def __init__(
        self, connection: psycopg.Connection[Any], floors: Floors, *, lock_limit_ms: int, hold_parked: bool
    ) -> None:
        super().__init__(sql.STATEMENTS, lock_limit_ms=lock_limit_ms, hold_parked=hold_parked)
        self._connection = connection
        self._floors = floors
        with _translated():
            found = connection.execute("SHOW synchronous_commit").fetchone()
            if found and found[0] == "off":  # a session that is lost while its messages are sent would send them twice
                connection.execute("SET synchronous_commit TO on")
            # Every statement here goes by an index; statistics that are old must not talk the planner out of it.
            for planner in ("enable_seqscan", "enable_bitmapscan", "enable_sort", "jit"):
                connection.execute(f"SET {planner} TO off")
            connection.execute("SET plan_cache_mode TO force_generic_plan")  # planning took longer than running
            # A relay that stops in the middle of a transaction must not keep the topic's row locked.
            connection.execute(f"SET idle_in_transaction_session_timeout TO {max(lock_limit_ms, 1)}")

    def create_tables(self) -> None:
        with self._transaction(durable=True):
            for statement in create_statements("postgresql"):
                self._connection.execute(statement)

    def topics_waiting(self) -> list[str]:
        topics, floors, rewinds = self._floors.known()
        limits = (self._lock_limit_ms, self._lock_limit_ms)
        return [topic for (topic,) in self._rows(sql.TOPICS, (topics, floors, rewinds, *limits))]

    def _topics_in_use(self) -> list[str]:
        return [topic for (topic,) in self._rows(sql.TOPICS_IN_USE)]

    def close(self) -> None:
        self._connection.close()

    # ---- the shared methods, in fewer round trips

    def _take(self, parameters: Sequence[Any], topic: str, hold: bytes) -> Row | None:
        rows = self._rows(sql.LOCK, parameters)
        return rows[0][:7] if rows else None

    def heartbeat(self, hold: Hold) -> None:
        if not self._rows(sql.HEARTBEAT, (hold.topic, self._uuid(hold.uuid))):
            raise fenced(hold)

    def finish(self, hold: Hold, finished: Finished, *, unlock: bool) -> None:
        statement = sql.finish(neighbours=_neighbours(finished.ids), unlock=unlock)
        if not self._rows(statement, self._done(hold, finished, {})):
            raise fenced(hold)

    def begin(
        self, hold: Hold, session: NewSession, choose: Choose, limit: BatchLimit, finished: Finished | None = None
    ) -> Batch:
        done = finished or Finished([])
        # Two round trips: what stands in the way and what waits; then the session, with its commit.
        with _translated(), self._connection.pipeline():
            with self._connection.transaction():
                guard = self._connection.execute(
                    sql.guard(neighbours=_neighbours(done.ids)), self._done(hold, done, session.ends or {})
                )
                floor = self._floors.of(hold.topic)
                selected = self._batch(hold, limit, floor.at)
                held = guard.fetchone()
                if held is None:
                    raise fenced(hold)
                rewinds, xmin, xid, aside = held
                heads: set[bytes] = self._heads(hold.topic) if aside else set()
                if aside or floor.rewinds != rewinds:
                    floor = self._floors.of(hold.topic, self._rewinds(hold) if aside else rewinds)
                    selected = self._batch(hold, limit, floor.at)
                rows = [Waiting(*row) for row in selected.fetchall()]
                chosen = choose(rows, frozenset(heads))
                if chosen.aside:
                    self._move_aside(hold.topic, chosen.aside)
                opened = self._opened(hold, session, chosen, len(done.ids))
            ids = [row.id for row in rows]
            more = more_waits(rows, chosen, limit)
            opened_ms = opened.fetchall()[0][0] if opened is not None else 0
        floor.saw(ids, full=more, xmin=xmin, xid=xid)
        return Batch(session.uuid, chosen.send, opened_ms, more, len(chosen.aside))

    def _opened(self, hold: Hold, session: NewSession, chosen: Chosen, done: int) -> Any:
        """A cursor whose row tells when the session was opened; None where there is nothing to send."""
        if not chosen.send:
            self._connection.execute(sql.STATEMENTS.close_session, (done, done, hold.topic, self._uuid(hold.uuid)))
            return None
        ids = pack_ids([row.id for row in chosen.send])
        opened = (self._uuid(session.uuid), ids, session.fence, session.topic_uuid, done, done, hold.topic)
        return self._connection.execute(sql.OPEN, opened)

    def _batch(self, hold: Hold, limit: BatchLimit, floor: int) -> Any:
        cursor = self._connection.cursor(binary=True)
        return cursor.execute(sql.STATEMENTS.batch, (hold.topic, floor, limit.rows, limit.size_bytes))

    def _done(self, hold: Hold, finished: Finished, offsets: Mapping[int, int]) -> dict[str, Any]:
        parameters: dict[str, Any] = {
            "topic": hold.topic,
            "hold": self._uuid(hold.uuid),
            "partitions": list(offsets),
            "offsets": list(offsets.values()),
            "done": len(finished.ids),
        }
        if _neighbours(finished.ids):
            return parameters | {"first": finished.ids[0], "last": finished.ids[-1]}
        return parameters | {"ids": list(finished.ids)}

    def _rewinds(self, hold: Hold) -> int:
        return int(self._rows("SELECT rewinds FROM kafka_topic_info WHERE topic = %s", (hold.topic,))[0][0])

    # ---- the driver's primitives

    def _rows(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[Row]:
        with _translated():
            return self._connection.execute(sql, parameters or None).fetchall()

    def _run(self, sql: str, parameters: Sequence[Any] = ()) -> int:
        with _translated():
            return self._connection.execute(sql, parameters or None).rowcount

    @contextmanager
    def _transaction(self, *, durable: bool) -> Iterator[None]:
        with _translated(), self._connection.transaction():
            yield

    def _uuid(self, value: bytes | None) -> UUID | None:
        return None if value is None else UUID(bytes=value)

    def _select(self, hold: Hold, limit: BatchLimit, rewinds: int) -> list[Waiting]:
        return [Waiting(*row) for row in self._batch(hold, limit, 0).fetchall()]


def _neighbours(ids: Sequence[int]) -> bool:
    """Whether ids that grow are one run, so that first and last name them all."""
    return bool(ids) and ids[-1] - ids[0] == len(ids) - 1


class PostgresOutboxDatabase:
    """Opens connections to one database."""

    def __init__(self, url: str, *, lock_limit_ms: int, hold_parked: bool) -> None:
        self._url = plain_url(url)
        self._lock_limit_ms = lock_limit_ms
        self._hold_parked = hold_parked
        self._floors = Floors()

    def connect(self) -> PostgresOutboxStore:
        connection = self._open("tidebook-outbox")
        with _translated():
            self._floors.are_of(connection.execute(sql.LIFE).fetchone())
        return PostgresOutboxStore(
            connection, self._floors, lock_limit_ms=self._lock_limit_ms, hold_parked=self._hold_parked
        )

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
                options=f"-c lock_timeout={LOCK_MS_MAX}",
                keepalives_idle=15,
                keepalives_interval=5,
                keepalives_count=3,
                tcp_user_timeout=30_000,
                prepare_threshold=2,
            )


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        raise translate(error) from error


def translate(error: psycopg.Error) -> TidebookError:
    """What psycopg reports, as Tidebook's own error. A commit whose outcome is unknown is safe: the next hold looks."""
    told = str(error).strip().partition("\n")[0] or type(error).__name__
    if isinstance(error, errors.UndefinedTable | errors.UndefinedColumn):
        return Unavailable(f"the outbox's tables are missing or old ({told}): run 'tidebook outbox migrate'")
    if isinstance(error, errors.InvalidPassword | errors.InvalidCatalogName | errors.InsufficientPrivilege):
        return InvalidInput(f"PostgreSQL refused: {told}: check the URL and the rights of its user")
    return Unavailable(f"PostgreSQL: {told}")
