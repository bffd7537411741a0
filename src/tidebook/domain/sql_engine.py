"""Run functions and handlers in transactions of a SQLAlchemy engine, sync or async."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, Table
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine

from tidebook.core.errors import InvalidInput

T = TypeVar("T")

#: Handles one event within a transaction: `handler(tx, event)`, sync or async.
Handler = Callable[[Any, Any], Any]


class ProjectionTx:
    """The transaction of a batch: a SQLAlchemy connection, with the names of the tables of this build.

    All names of the connection work on it. `table` returns the table that the handler must write to: the live one, or
    its copy during a rebuild.
    """

    def __init__(self, connection: Any, tables: Mapping[str, Table], suffix: str) -> None:
        self.connection = connection
        self.execute = connection.execute
        self.asked = False
        self._tables = tables
        self._suffix = suffix

    def table(self, table: Table | str) -> Any:
        """Return the table, or the name of the table, of this build."""
        self.asked = True
        if isinstance(table, str):
            return f"{table}{self._suffix}"
        found = self._tables.get(table.name)
        return table if found is None else found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)


class SqlEngine:
    """A sync or async engine behind one interface."""

    def __init__(self, engine: Any) -> None:
        if not isinstance(engine, Engine | AsyncEngine):
            raise InvalidInput(f"into is a SQLAlchemy engine, sync or async, not {type(engine).__name__}")
        self._engine = engine
        self.dialect = engine.dialect.name

    def dispose(self) -> None:
        """Close the connections of the pool."""
        engine = self._engine.sync_engine if isinstance(self._engine, AsyncEngine) else self._engine
        engine.dispose()

    async def run(self, work: Callable[[Connection], T]) -> T:
        """Run a function with a connection in one transaction, off the event loop."""
        engine = self._engine
        if isinstance(engine, AsyncEngine):
            async with engine.begin() as connection:
                return await connection.run_sync(work)

        def in_thread() -> T:
            with engine.begin() as connection:
                return work(connection)

        return await asyncio.to_thread(in_thread)

    async def apply(
        self,
        fence: Callable[[Connection], None],
        calls: Sequence[tuple[Handler, Any]],
        make_tx: Callable[[Any], ProjectionTx],
        check: Callable[[ProjectionTx], None],
    ) -> None:
        """Run the fence, then each handler with its event, in one transaction; `check` may still refuse it."""
        engine = self._engine
        is_async = any(inspect.iscoroutinefunction(handler) for handler, _ in calls)
        if isinstance(engine, AsyncEngine):
            async with engine.begin() as connection:
                await connection.run_sync(fence)
                tx = make_tx(connection) if is_async else None
                if tx is None:
                    tx = await connection.run_sync(lambda sync: _call_all(calls, make_tx(sync)))
                else:
                    await _await_all(calls, tx)
                check(tx)
            return

        def in_thread() -> None:
            with engine.begin() as connection:
                fence(connection)
                tx = make_tx(connection)
                if is_async:
                    asyncio.run(_await_all(calls, tx))  # a handler may await; the connection blocks only this thread
                else:
                    _call_all(calls, tx)
                check(tx)

        await asyncio.to_thread(in_thread)


class HandlerFailed(Exception):
    """A handler raised; the cause is its error."""

    def __init__(self, event: Any) -> None:
        super().__init__(f"{event.topic}/{event.id}: the handler failed at event {event.seq_nr}")
        self.event = event


def _call_all(calls: Sequence[tuple[Handler, Any]], tx: ProjectionTx) -> ProjectionTx:
    for handler, event in calls:
        try:
            handler(tx, event)
        except Exception as error:
            raise HandlerFailed(event) from error
    return tx


async def _await_all(calls: Sequence[tuple[Handler, Any]], tx: ProjectionTx) -> None:
    for handler, event in calls:
        try:
            result = handler(tx, event)
            if result is not None and inspect.isawaitable(result):
                await result
        except Exception as error:
            raise HandlerFailed(event) from error


def is_passing(error: BaseException) -> bool:
    """Return whether an error is of the database or the way to it, so that the same batch may succeed later.

    A statement of a handler may fail with the same class of error for its own fault, such as a missing table.
    """
    if isinstance(error, HandlerFailed):
        cause = error.__cause__
        return isinstance(cause, DBAPIError) and cause.connection_invalidated
    return isinstance(error, OperationalError | InterfaceError | OSError)
