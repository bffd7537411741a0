"""Projections into PostgreSQL and MariaDB: exactly-once, shared slices, rebuild and swap under load."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import Column, Integer, MetaData, String, Table, create_engine, inspect, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.schema import CreateSchema, DropSchema

import tidebook
from tests.unit.domain.bank import EVENTS, Account, Deposit
from tests.unit.domain.projecting import replicating, running
from tidebook.core.errors import Fenced, ProjectionStopped
from tidebook.domain import projection_runner
from tidebook.domain.projection_rebuild import Rebuild
from tidebook.domain.projection_tables import MEMBER, ProjectionTables


@pytest.fixture(
    params=[pytest.param("postgres", marks=pytest.mark.postgres), pytest.param("mariadb", marks=pytest.mark.mariadb)]
)
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found.replace("postgresql://", "postgresql+psycopg://").replace("mysql://", "mysql+pymysql://")


class Target:
    """A database with a table of balances under a separate name."""

    def __init__(self, url: str) -> None:
        self.engine = create_engine(url)
        self.projection = f"balances-{uuid.uuid4().hex[:8]}"
        name = f"balances_{uuid.uuid4().hex[:8]}"
        columns = Column("id", String(100), primary_key=True), Column("amount", Integer, index=True)
        self.table = Table(name, MetaData(), *columns)

    def balances(self) -> dict[str, int]:
        with self.engine.connect() as connection:
            return {row.id: row.amount for row in connection.execute(select(self.table))}

    def add(self, tx: Any, event: Any) -> None:
        table = tx.table(self.table)
        change = table.c.amount + event.data.amount
        if not tx.execute(table.update().where(table.c.id == event.id).values(amount=change)).rowcount:
            tx.execute(table.insert().values(id=event.id, amount=event.data.amount))

    async def add_async(self, tx: Any, event: Any) -> None:
        table = tx.table(self.table)
        change = table.c.amount + event.data.amount
        done = await tx.execute(table.update().where(table.c.id == event.id).values(amount=change))
        if not done.rowcount:
            await tx.execute(table.insert().values(id=event.id, amount=event.data.amount))


@pytest_asyncio.fixture
async def target(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Target]:
    monkeypatch.setattr(projection_runner, "REBALANCE_S", 0.05)
    target = Target(url)
    yield target
    with target.engine.begin() as connection:
        rows = ProjectionTables(target.projection, target.engine.dialect.name)
        for build in range(1, 5):
            rows.remove_build(connection, build)
        target.table.drop(connection, checkfirst=True)
    target.engine.dispose()


async def test_rebuilds_by_two_processes_under_load_lose_and_repeat_no_event(target: Target, tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as one, tidebook.open(tmp_path) as two, replicating(one, "accounts"):
        accounts = one.decider("accounts", Account, events=EVENTS)
        first, second = (
            book.projection(
                target.projection, topics=["accounts"], into=target.engine, tables=[target.table], events=EVENTS
            )(target.add)
            for book in (one, two)
        )
        written, seen, stop = 0, list[int](), asyncio.Event()

        async def write() -> None:
            nonlocal written
            while not stop.is_set():
                await accounts.execute(f"a-{written % 9}", Deposit(1))
                written += 1
                seen.append(sum(target.balances().values()))

        async with running(first, second):
            await first.wait_for(await accounts.execute("a-0", Deposit(1)))
            writing = asyncio.create_task(write())
            assert await first.rebuild() == 2
            assert await second.rebuild() == 3
            stop.set()
            await writing
            for n in range(9):
                await first.wait_for(await accounts.execute(f"a-{n}", Deposit(1)))
        assert sum(target.balances().values()) == written + 10
        assert seen == sorted(seen)
        names = inspect(target.engine).get_table_names()
        assert [name for name in names if name.startswith(target.table.name)] == [target.table.name]


async def test_an_announced_swap_is_completed_by_the_next_process(target: Target, tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book, replicating(book, "accounts"):
        accounts = book.decider("accounts", Account, events=EVENTS)

        def make() -> Any:
            made = book.projection(target.projection, topics=["accounts"], into=target.engine, tables=[target.table])
            return made(target.add)

        projection = make()
        async with running(projection):
            await projection.wait_for(await accounts.execute("a-0", Deposit(5)))
        # As if the process had died between the announcement and the renaming.
        build = projection._rebuild()._copy_of(2)
        with target.engine.begin() as connection:
            projection._rows.begin_build(connection, "rebuild", 0.0)
            for table in build.tables.values():
                table.create(connection)
            connection.execute(build.tables[target.table.name].insert().values(id="a-0", amount=7))
        with target.engine.begin() as connection:
            projection._rows.set_swapping(connection, 2, projection._followed)
            for each in projection._rows.slices(connection, 1):
                connection.execute(projection_slice_update(projection.name, each.slice, each.position))
        again = make()
        async with running(again):
            await again.wait_for(await accounts.execute("a-0", Deposit(1)))
        assert target.balances() == {"a-0": 8}


async def test_a_rebuild_that_was_suspended_before_its_swap_is_fenced_by_a_later_one(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tidebook.open(tmp_path) as book, replicating(book, "accounts"):
        accounts = book.decider("accounts", Account, events=EVENTS)
        projection = book.projection(target.projection, topics=["accounts"], into=target.engine, tables=[target.table])
        projection(target.add)
        async with running(projection):
            await projection.wait_for(await accounts.execute("a-0", Deposit(5)))
        late, swap = projection._rebuild(), Rebuild._swap

        async def suspended(live: int, build: Any, name: str) -> None:
            """Begin another rebuild, as if this one had been stopped for longer than its lease."""
            with target.engine.begin() as connection:
                projection._rows.leave(connection, build.number, member_of(connection, build.number))
                state = projection._rows.begin_build(connection, "another", 60.0)
            await projection._rebuild()._remove_abandoned(state)
            await swap(late, live, build, name)

        def member_of(connection: Any, build: int) -> str:
            where = (MEMBER.c.projection == projection.name) & (MEMBER.c.build == build)
            return str(connection.execute(select(MEMBER.c.member).where(where)).scalar_one())

        monkeypatch.setattr(late, "_swap", suspended)
        with pytest.raises(Fenced, match="rebuild"):
            await late.run(await projection.start(), is_same=True)
        assert (await projection.stored()).build == 1
        async with running(projection):
            await projection.wait_for(await accounts.execute("a-0", Deposit(1)))
        assert target.balances() == {"a-0": 6}


def projection_slice_update(name: str, number: int, position: str) -> Any:
    from tidebook.domain.projection_tables import SLICE

    return (
        SLICE.update()
        .where(SLICE.c.projection == name, SLICE.c.build == 2, SLICE.c.slice == number)
        .values(position=position)
    )


@pytest.mark.postgres
async def test_a_projection_through_an_async_engine_is_up_to_date_after_wait_for(
    postgres_url: str, tmp_path: Path
) -> None:
    target = Target(postgres_url.replace("postgresql://", "postgresql+psycopg://"))
    engine = create_async_engine(postgres_url.replace("postgresql://", "postgresql+psycopg://"))
    async with tidebook.open(tmp_path) as book, replicating(book, "accounts"):
        accounts = book.decider("accounts", Account, events=EVENTS)
        projection = book.projection(target.projection, topics=["accounts"], into=engine, tables=[target.table])
        projection(target.add_async)
        async with running(projection):
            for n in range(20):
                done = await accounts.execute(f"a-{n % 3}", Deposit(n))
                await projection.wait_for(done)
                assert target.balances()[f"a-{n % 3}"] == done.state.balance
    await engine.dispose()
    target.table.drop(target.engine)
    target.engine.dispose()


@pytest.mark.postgres
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_a_batch_with_an_error_that_its_handler_caught_is_not_applied(
    postgres_url: str, tmp_path: Path, is_async: bool
) -> None:
    url = postgres_url.replace("postgresql://", "postgresql+psycopg://")
    target = Target(url)
    into: Any = create_async_engine(url) if is_async else target.engine

    def insert_if_new(tx: Any, event: Any) -> None:
        with suppress(IntegrityError):  # PostgreSQL rolls the transaction back at commit
            tx.execute(target.table.insert().values(id=event.id, amount=event.data.amount))

    async with tidebook.open(tmp_path) as book, replicating(book, "accounts"):
        accounts = book.decider("accounts", Account, events=EVENTS)
        projection = book.projection(
            target.projection, topics=["accounts"], into=into, tables=[target.table], retries=1
        )(insert_if_new)
        async with running(projection):
            await projection.wait_for(await accounts.execute("a-0", Deposit(1)))
            again = await accounts.execute("a-0", Deposit(1))
            with pytest.raises(ProjectionStopped, match=r"accounts/a-0/2: .*begin_nested"):
                await projection.wait_for(again)
            await projection.wait_for(await accounts.execute("a-1", Deposit(2)))
        assert target.balances() == {"a-0": 1, "a-1": 2}
    if is_async:
        await into.dispose()
    target.table.drop(target.engine)
    target.engine.dispose()


@pytest.mark.postgres
async def test_a_rebuild_swaps_a_table_of_a_schema(postgres_url: str, tmp_path: Path) -> None:
    engine = create_engine(postgres_url.replace("postgresql://", "postgresql+psycopg://"))
    schema, version = f"read_{uuid.uuid4().hex[:8]}", 1
    table = Table("versions", MetaData(), Column("id", String(100)), Column("version", Integer), schema=schema)

    def put(tx: Any, event: Any) -> None:
        tx.execute(tx.table(table).insert().values(id=event.id, version=version))

    with engine.begin() as connection:
        connection.execute(CreateSchema(schema))
    async with tidebook.open(tmp_path) as book, replicating(book, "accounts"):
        accounts = book.decider("accounts", Account, events=EVENTS)
        projection = book.projection(schema, topics=["accounts"], into=engine, tables=[table])(put)
        async with running(projection):
            await projection.wait_for(await accounts.execute("a-0", Deposit(1)))
            version = 2
            assert await projection.rebuild() == 2
            await projection.wait_for(await accounts.execute("a-1", Deposit(1)))
    with engine.begin() as connection:
        found = connection.execute(select(table).order_by(table.c.id)).all()
        names = inspect(connection).get_table_names(schema=schema)
        connection.execute(DropSchema(schema, cascade=True))
    engine.dispose()
    assert [tuple(row) for row in found] == [("a-0", 2), ("a-1", 2)]
    assert names == ["versions"]
