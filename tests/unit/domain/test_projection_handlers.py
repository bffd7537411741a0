"""The use of a batch's transaction by its handlers, and the forms that handlers may have."""

from __future__ import annotations

import asyncio
import functools
import struct
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine

import tidebook
from tests.unit.domain.projecting import (
    BALANCES,
    async_sqlite_engine,
    balances,
    replicate_and_tick,
    replicating,
    running,
    sqlite_engine,
)
from tidebook.core.errors import InvalidInput, ProjectionStopped
from tidebook.core.event import Event
from tidebook.domain.sql_engine import SqlEngine, is_transient


def put(tx: Any, event: Any) -> Any:
    """Write a row for an event, or return an awaitable that does."""
    return tx.execute(BALANCES.insert().values(id=f"{event.id}/{event.seq_nr}", amount=1))


async def put_async(tx: Any, event: Any) -> None:
    await put(tx, event)


async def put_in_coroutine(tx: Any, event: Any) -> None:
    put(tx, event)


@pytest.mark.parametrize(
    "end",
    [
        lambda tx: tx.rollback(),
        lambda tx: tx.connection.rollback(),
        lambda tx: tx.commit(),
        lambda tx: tx.execute(text("ROLLBACK")),
    ],
    ids=["rollback", "connection", "commit", "statement"],
)
async def test_a_handler_that_ends_the_transaction_stops_its_slice(tmp_path: Path, end: Any) -> None:
    engine = sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as book:

        @book.projection("p", topics=["t"], into=engine, tables=[BALANCES], retries=0)
        def projection(tx: Any, event: Any) -> None:
            put(tx, event)
            if event.seq_nr == 2:
                end(tx)

        await book.journal("t").append("x", [Event(n) for n in range(3)])
        await replicate_and_tick(book, "t")
        async with running(projection):
            with pytest.raises(ProjectionStopped, match=r"t/x/2: .*begin_nested"):
                await projection.settle()
        assert sorted(balances(engine)) == ["x/1"]
        assert projection.status().events == 1


async def test_an_error_within_a_savepoint_may_be_caught(tmp_path: Path) -> None:
    engine = sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as book:

        @book.projection("p", topics=["t"], into=engine, tables=[BALANCES], retries=0)
        def projection(tx: Any, event: Any) -> None:
            put(tx, event)
            try:
                with tx.begin_nested():
                    put(tx, event)
            except IntegrityError:
                pass

        await book.journal("t").append("x", [Event(n) for n in range(3)])
        await replicate_and_tick(book, "t")
        async with running(projection):
            await projection.settle()
        assert sorted(balances(engine)) == ["x/1", "x/2", "x/3"]


class Callable:
    """A callable object as a handler."""

    def __init__(self, function: Any) -> None:
        self._function = function

    async def __call__(self, tx: Any, event: Any) -> None:
        await self._function(tx, event)


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


@pytest.mark.parametrize("form", ["lambda", "object", "decorator", "partial"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync engine", "async engine"])
async def test_a_result_of_a_handler_is_awaited_or_refused(tmp_path: Path, form: str, is_async: bool) -> None:
    engine = sqlite_engine(tmp_path)
    into: Any = async_sqlite_engine(tmp_path) if is_async else engine
    real = put_async if is_async else put_in_coroutine
    handler: Any = {
        "lambda": lambda tx, event: real(tx, event),
        "object": Callable(real),
        "decorator": decorated(real),
        "partial": functools.partial(real),
    }[form]
    async with tidebook.open(tmp_path) as book:
        projection = book.projection("p", topics=["t"], into=into, tables=[BALANCES], retries=0)(handler)
        await book.journal("t").append("x", [Event(n) for n in range(3)])
        await replicate_and_tick(book, "t")
        async with running(projection):
            if form == "lambda" and is_async:
                with pytest.raises(ProjectionStopped, match="async def"):
                    await projection.settle()
            else:
                await projection.settle()
                assert sorted(balances(engine)) == ["x/1", "x/2", "x/3"]
    if is_async:
        await into.dispose()


async def test_sync_and_async_handlers_share_the_batch_of_an_async_engine(tmp_path: Path) -> None:
    engine, into = sqlite_engine(tmp_path), async_sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as book:
        projection = book.projection("p", topics=["t"], into=into, tables=[BALANCES], retries=0)
        projection.on("a")(put_async)
        projection.on("b")(put)
        await book.journal("t").append("x", [Event(n, type="ab"[n % 2]) for n in range(4)])
        await replicate_and_tick(book, "t")
        async with running(projection):
            await projection.settle()
        assert sorted(balances(engine)) == ["x/1", "x/2", "x/3", "x/4"]
    await into.dispose()


async def test_a_generator_as_handler_is_refused(tmp_path: Path) -> None:
    def generator(tx: Any, event: Any) -> Any:
        yield put(tx, event)

    async def async_generator(tx: Any, event: Any) -> Any:
        yield put(tx, event)

    async with tidebook.open(tmp_path) as book:
        projection = book.projection("p", topics=["t"], into=sqlite_engine(tmp_path))
        for handler in (generator, async_generator):
            with pytest.raises(InvalidInput, match="is a generator"):
                projection(handler)
            with pytest.raises(InvalidInput, match="is a generator"):
                projection.on("a")(handler)


async def test_a_rebuild_refuses_each_handler_that_writes_to_a_live_table(tmp_path: Path) -> None:
    engine = sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as book:
        projection = book.projection("p", topics=["t"], into=engine, tables=[BALANCES], retries=0)

        @projection.on("a")
        def asks(tx: Any, event: Any) -> None:
            tx.execute(tx.table(BALANCES).insert().values(id=f"{event.id}/{event.seq_nr}", amount=1))

        @projection.on("b")
        def does_not(tx: Any, event: Any) -> None:
            tx.execute(text("INSERT INTO balances VALUES (hex(randomblob(8)), 1)"))

        await book.journal("t").append("x", [Event(n, type="ab"[n % 2]) for n in range(4)])
        await replicate_and_tick(book, "t")
        async with running(projection):
            await projection.settle()
        with pytest.raises(ProjectionStopped, match=r"of the rebuild is stopped at t/x/2: .*tx\.table"):
            await projection.rebuild()
        assert len(balances(engine)) == 4


async def test_a_rebuild_accepts_a_handler_that_ignores_events(tmp_path: Path) -> None:
    engine = sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as book, replicating(book, "t"):

        @book.projection("p", topics=["t"], into=engine, tables=[BALANCES], retries=0)
        def projection(tx: Any, event: Any) -> None:
            tx.execute(BALANCES.select())

        await book.journal("t").append("x", [Event(1)])
        await replicate_and_tick(book, "t")
        assert await projection.rebuild() == 2


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_a_database_that_is_starting_up_is_a_transient_error_of_every_driver(driver: str) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer as PostgreSQL does during its recovery."""
        while True:
            (size,) = struct.unpack("!i", await reader.readexactly(4))
            if (await reader.readexactly(size - 4))[:4] != struct.pack("!i", 80877103):  # refuse the request for TLS
                break
            writer.write(b"N")
        body = b"SFATAL\0VFATAL\0C57P03\0Mthe database system is starting up\0\0"
        writer.write(b"E" + struct.pack("!i", len(body) + 4) + body)
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        engine = create_async_engine(f"postgresql+{driver}://u@127.0.0.1:{port}/d")
        with pytest.raises(DBAPIError, match="starting up") as raised:
            await SqlEngine(engine).run(lambda connection: None)
        assert is_transient(raised.value)
        await engine.dispose()


@pytest.mark.parametrize("form", ["sync", "async handler", "async engine", "async both"])
async def test_a_cancellation_that_a_handler_raises_stops_only_its_slice(tmp_path: Path, form: str) -> None:
    engine = sqlite_engine(tmp_path)
    into: Any = async_sqlite_engine(tmp_path) if form in ("async engine", "async both") else engine

    def write(tx: Any, event: Any) -> Any:
        if event.id == "bad":
            raise asyncio.CancelledError
        return put(tx, event)

    async def write_async(tx: Any, event: Any) -> None:
        done = write(tx, event)
        if form == "async both":
            await done

    async with tidebook.open(tmp_path) as book:
        projection = book.projection("p", topics=["t"], into=into, tables=[BALANCES], retries=1)
        projection(write_async if form in ("async handler", "async both") else write)
        for id in ("bad", "x", "y"):
            await book.journal("t").append(id, [Event(1)])
        await replicate_and_tick(book, "t")
        async with running(projection):
            with pytest.raises(ProjectionStopped, match="t/bad/1: CancelledError"):
                await projection.settle()
            async with asyncio.timeout(20):
                while len(balances(engine)) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
    if into.dialect.is_async:
        await into.dispose()
