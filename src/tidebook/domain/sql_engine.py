"""Run functions and handlers in transactions of a SQLAlchemy engine, sync or async."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, Final, NoReturn, TypeVar

from sqlalchemy import Connection, Engine, Table
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from tidebook.core.errors import InvalidInput, OutcomeUnknown, Unavailable

T = TypeVar("T")

#: Handles one event within a transaction: `handler(tx, event)`, sync or async.
Handler = Callable[[Any, Any], Any]


#: The methods that would end the transaction of a batch, which also has other events and the offset.
_ENDINGS: Final = frozenset(
    {"begin", "begin_twophase", "commit", "rollback", "close", "aclose", "detach", "invalidate"}
)


class ProjectionTx:
    """The transaction of a batch: a SQLAlchemy connection, with the names of the tables of this build.

    It has the methods of the connection, except those that would end the transaction. `table` returns the table that
    the handler must write to: the live one, or its copy during a rebuild.
    """

    def __init__(self, connection: Any, tables: Mapping[str, Table], suffix: str) -> None:
        self._connection = connection
        self._tables = tables
        self._suffix = suffix
        self.begin_call()

    def begin_call(self) -> None:
        """Forget what the handler did for the previous event."""
        #: Whether the handler asked for its tables, and whether it may have written to any.
        self.asked = self.used = False

    @property
    def connection(self) -> Any:
        """The connection of SQLAlchemy."""
        self.used = True
        return self._connection

    def execute(self, statement: Any, *args: Any, **options: Any) -> Any:
        """Execute a statement as the connection does."""
        if not getattr(statement, "is_select", False):
            self.used = True
        return self._connection.execute(statement, *args, **options)

    def table(self, table: Table | str) -> Any:
        """Return the table, or the name of the table, of this build."""
        self.asked = True
        if isinstance(table, str):
            return f"{table}{self._suffix}"
        found = self._tables.get(table.key)
        return table if found is None else found

    def __getattr__(self, name: str) -> Any:
        if name in _ENDINGS:
            raise InvalidInput(
                f"tx.{name}: the transaction contains the whole batch and its offset: "
                "use tx.begin_nested() for a part of it"
            )
        self.used = True
        return getattr(self._connection, name)


class SqlEngine:
    """A sync or async engine behind one interface."""

    def __init__(self, engine: Any) -> None:
        if not isinstance(engine, Engine | AsyncEngine):
            raise InvalidInput(f"into must be a SQLAlchemy engine, sync or async, not {type(engine).__name__}")
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
        verify: Callable[[Connection], None],
    ) -> None:
        """Run the fence, then each handler with its event, in one transaction.

        `check` may refuse the transaction after each handler, and `verify` may before the commit: `verify` reads what
        the fence has written, and raises if that is gone. Without handlers, neither is called.
        """
        engine = self._engine
        if isinstance(engine, AsyncEngine):
            async with engine.begin() as connection:
                await connection.run_sync(fence)
                await _apply_async(calls, connection, make_tx, check)
                if calls:
                    await connection.run_sync(verify)
            return

        def in_thread() -> None:
            with engine.begin() as connection:
                fence(connection)
                tx, guard = make_tx(connection), _Guard(connection, check)
                if any(is_async_handler(handler) for handler, _ in calls):
                    asyncio.run(_await_all(calls, tx, guard))  # the connection blocks only this thread
                else:
                    _call_all(calls, tx, guard, _run_awaitable)
                if calls:
                    verify(connection)

        await asyncio.to_thread(in_thread)


class HandlerFailed(Exception):
    """A handler raised; the cause is its error."""

    def __init__(self, event: Any) -> None:
        super().__init__(f"{event.topic}/{event.id}: the handler failed at event {event.seq_nr}")
        self.event = event


class RolledBack(InvalidInput):
    """A handler ended the transaction of its batch, so that neither its rows nor the offset would be stored."""

    def __init__(self) -> None:
        super().__init__(
            "the transaction of the batch was ended within a handler: a handler that expects an error of the database, "
            "or rolls back, must do so within tx.begin_nested()"
        )


class LiveTableWritten(InvalidInput):
    """A handler may have written to a live table during a rebuild, which no setting for failed events may skip."""

    def __init__(self) -> None:
        super().__init__("a rebuild needs handlers that write to tx.table(...): these would write to the live tables")


def raise_handler_failed(event: Any, error: BaseException) -> NoReturn:
    """Raise HandlerFailed, but raise a CancelledError again if it is the current task that was cancelled."""
    if isinstance(error, asyncio.CancelledError):
        with suppress(RuntimeError):  # a thread without an event loop cannot be cancelled
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise error
    raise HandlerFailed(event) from error


def check_handler(handler: Any) -> None:
    """Raise InvalidInput for an object that cannot be a handler."""
    if not callable(handler):
        raise InvalidInput(f"a handler must be a function of a transaction and an event, not {type(handler).__name__}")
    for form in (handler, getattr(type(handler), "__call__", None)):  # noqa: B004
        if inspect.isgeneratorfunction(form) or inspect.isasyncgenfunction(form):
            raise InvalidInput(f"handler {_name(handler)} is a generator: it would return before its first statement")


def is_async_handler(handler: Handler) -> bool:
    """Return whether a handler is known to return an awaitable: a coroutine function, bare, wrapped or of an object."""
    forms = (handler, inspect.unwrap(handler), getattr(type(handler), "__call__", None))  # noqa: B004
    return any(inspect.iscoroutinefunction(form) for form in forms)


def _name(handler: Any) -> str:
    return str(getattr(handler, "__qualname__", type(handler).__qualname__))


class _Guard:
    """Checks after each handler that the transaction is still the one that the batch began."""

    def __init__(self, connection: Connection, check: Callable[[ProjectionTx], None]) -> None:
        self._connection = connection
        self._began = connection.get_transaction()
        self._check = check

    def __call__(self, tx: ProjectionTx) -> None:
        began = self._began
        if began is None or not began.is_active or self._connection.get_transaction() is not began:
            raise RolledBack()
        self._check(tx)


def _call_all(
    calls: Sequence[tuple[Handler, Any]],
    tx: ProjectionTx,
    guard: _Guard,
    take: Callable[[Handler, Awaitable[Any]], None],
) -> None:
    for handler, event in calls:
        try:
            tx.begin_call()
            result = handler(tx, event)
            if result is not None and inspect.isawaitable(result):
                take(handler, result)
            guard(tx)
        except (Exception, asyncio.CancelledError) as error:
            raise_handler_failed(event, error)


async def _await_all(calls: Sequence[tuple[Handler, Any]], tx: ProjectionTx, guard: _Guard) -> None:
    for handler, event in calls:
        try:
            tx.begin_call()
            result = handler(tx, event)
            if result is not None and inspect.isawaitable(result):
                await result
            guard(tx)
        except (Exception, asyncio.CancelledError) as error:
            raise_handler_failed(event, error)


async def _apply_async(
    calls: Sequence[tuple[Handler, Any]],
    connection: AsyncConnection,
    make_tx: Callable[[Any], ProjectionTx],
    check: Callable[[ProjectionTx], None],
) -> None:
    """Call each handler with the form of the connection that it can use: async ones await, others block a greenlet."""
    guard = await connection.run_sync(lambda sync: _Guard(sync, check))
    for is_async, group in groupby(calls, key=lambda call: is_async_handler(call[0])):
        some = list(group)
        if is_async:
            await _await_all(some, make_tx(connection), guard)
        else:
            await connection.run_sync(lambda sync, some=some: _call_all(some, make_tx(sync), guard, _refuse_awaitable))  # type: ignore[misc]


def _run_awaitable(_: Handler, result: Awaitable[Any]) -> None:
    async def wait() -> None:
        await result

    asyncio.run(wait())


def _refuse_awaitable(handler: Handler, result: Awaitable[Any]) -> None:
    """Raise InvalidInput: the handler got a sync transaction, so the awaitable that it returned cannot use it."""
    if inspect.iscoroutine(result):
        result.close()
    raise InvalidInput(
        f"handler {_name(handler)} returned an awaitable but is not a coroutine function: with an async engine, "
        "declare it with async def"
    )


#: No connection; too few resources; shut down, or starting up; a deadlock or a conflict of transactions.
TRANSIENT_STATES: Final = ("08", "53", "57P0", "40001", "40P01")


def is_transient(error: BaseException) -> bool:
    """Return whether an error comes from a server or its connection, so that the same batch may succeed later.

    A statement of a handler may fail with the same class of error because of a mistake, such as a missing table. The
    log, the store or the queue that the effects of a process manager need may be unavailable, as the database may.
    """
    if isinstance(error, HandlerFailed):
        cause = error.__cause__
        if isinstance(cause, DBAPIError):
            return bool(cause.connection_invalidated) or _has_transient_state(cause)
        return isinstance(cause, Unavailable | OutcomeUnknown)
    transient = OperationalError | InterfaceError | OSError | Unavailable | OutcomeUnknown
    return isinstance(error, transient) or _has_transient_state(error)


def _has_transient_state(error: BaseException) -> bool:
    """Return whether the SQLSTATE is transient: asyncpg's errors have no more specific class."""
    state = getattr(getattr(error, "orig", None), "sqlstate", None)
    return isinstance(state, str) and state.startswith(TRANSIENT_STATES)
