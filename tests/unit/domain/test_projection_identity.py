"""The state that a projection stores under its name: source, slices, builds and parked events."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import inspect, text

import tidebook
from tests.unit.domain.bank import EVENTS, Account, Deposit
from tests.unit.domain.projecting import (
    BALANCES,
    add,
    balances,
    replicate_and_tick,
    replicating,
    running,
    sqlite_engine,
)
from tidebook.core.errors import EventParked, Fenced, InvalidInput, ProjectionStopped
from tidebook.core.event import Event
from tidebook.domain import projection_runner
from tidebook.domain.event_source import slice_of
from tidebook.domain.projection_tables import MEMBER, SLICE, create_tables


def put(tx: Any, event: Any) -> None:
    tx.execute(tx.table(BALANCES).insert().values(id=f"{event.topic}/{event.id}/{event.seq_nr}", amount=1))


async def test_another_source_under_the_same_name_is_refused_until_a_rebuild(tmp_path: Path) -> None:
    engine = sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as book:
        for topic in ("u", "t"):
            await book.journal(topic).append("x", [Event(1, tags={"paid"})])
        await replicate_and_tick(book, "t", "u")
        first = book.projection("p", topics=["t"], into=engine, tables=[BALANCES])(put)
        async with running(first):
            await first.settle()
        same = book.projection("p", topics=["t", "t"], into=engine, tables=[BALANCES])(put)
        assert (await same.start()).build == 1
        tagged = book.projection("p", tags=["paid"], into=engine, tables=[BALANCES])(put)
        with pytest.raises(InvalidInput, match="paid"):
            await tagged.run()
        both = book.projection("p", topics=["u", "t"], into=engine, tables=[BALANCES])(put)
        with pytest.raises(InvalidInput, match=r'\["t"\].*\["t","u"\].*rebuild it'):
            await both.run()
        with pytest.raises(InvalidInput, match="rebuild it"):
            await both.settle()
        async with replicating(book, "t", "u"):
            assert await both.rebuild() == 2
        async with running(both):
            await both.settle()
        assert sorted(balances(engine)) == ["t/x/1", "u/x/1"]
        with pytest.raises(InvalidInput, match="another name"):
            await first.run()


async def test_a_projection_of_an_earlier_release_adopts_the_source_it_is_started_with(tmp_path: Path) -> None:
    engine = sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as book:
        projection = book.projection("p", topics=["t"], into=engine)(put)
        await projection.start()
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE tidebook_projection DROP COLUMN source"))
        assert (await projection.stored()).build == 1
        assert await book.projection("p", topics=["t"], into=engine)._stored_slices() == 16
        await projection.start()
        with pytest.raises(InvalidInput, match="another name"):
            await book.projection("p", topics=["u"], into=engine)(put).start()


async def test_a_process_that_only_waits_uses_the_stored_slices(tmp_path: Path) -> None:
    engine = sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as book, replicating(book, "accounts"):
        accounts = book.decider("accounts", Account, events=EVENTS)

        @book.projection("p", topics=["accounts"], into=engine, tables=[BALANCES], slices=2, retries=0)
        def projection(tx: Any, event: Any) -> None:
            if slice_of(event.topic, event.id, 2) == 1:
                raise ValueError("never applied")
            add(tx, event)

        ids = {slice_of("accounts", f"a-{n}", 2): f"a-{n}" for n in range(20)}
        fewer, more = (book.projection("p", topics=["accounts"], into=engine, slices=slices)(add) for slices in (1, 16))
        waiting = asyncio.create_task(more.wait_for(await accounts.execute(ids[0], Deposit(1)), timeout_s=10))
        await asyncio.sleep(0)
        async with running(projection):
            await waiting
            done = await accounts.execute(ids[1], Deposit(1))
            for waiter in (fewer, more):
                with pytest.raises(ProjectionStopped, match="never applied"):
                    await waiter.wait_for(done, timeout_s=10)


@pytest.mark.parametrize("on_failure", ["park", "stop"])
async def test_a_bad_event_with_the_number_of_a_purged_one_is_parked_as_another(
    tmp_path: Path, on_failure: Any
) -> None:
    engine = sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as book, replicating(book, "t"):

        @book.projection("p", topics=["t"], into=engine, tables=[BALANCES], retries=0, on_failure=on_failure)
        def projection(tx: Any, event: Any) -> None:
            if event.data == "bad":
                raise ValueError("bad")
            put(tx, event)

        journal = book.journal("t")
        async with running(projection), asyncio.timeout(20):
            await projection.start()
            for count in (1, 2):
                await journal.append("x", [Event("bad")])
                while len((await projection.stored()).parked) < count:
                    if projection.status().stopped:
                        assert await projection.skip() == ["t/x/1"]
                    await asyncio.sleep(0.01)
                await journal.purge("x")
            assert [each.event for each in (await projection.stored()).parked] == ["t/x/1", "t/x/1"]


async def test_no_slice_waits_for_the_lease_of_a_finished_rebuild(tmp_path: Path) -> None:
    engine = sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as book, replicating(book, "accounts"):
        accounts = book.decider("accounts", Account, events=EVENTS)
        projection = book.projection("p", topics=["accounts"], into=engine, tables=[BALANCES])(add)
        async with running(projection):
            await projection.wait_for(await accounts.execute("a-0", Deposit(1)))
            assert await projection.rebuild() == 2
            async with asyncio.timeout(projection_runner.LEASE_S / 2):
                for n in range(10):
                    await projection.wait_for(await accounts.execute(f"a-{n}", Deposit(1)))


async def test_a_second_rebuild_is_refused_while_one_runs(tmp_path: Path) -> None:
    engine = sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as book:
        await book.journal("t").append("x", [Event(1)])
        await replicate_and_tick(book, "t")
        first, second = (book.projection("p", topics=["t"], into=engine, tables=[BALANCES])(put) for _ in range(2))
        async with running(first):
            await first.settle()
        begin = second._rows.begin_build
        with engine.begin() as connection:
            begin(connection, "rebuild of another process", 60.0)
        with pytest.raises(Fenced, match="being rebuilt"):
            await first.rebuild()


async def test_a_swap_of_a_build_that_was_replaced_is_refused(tmp_path: Path) -> None:
    engine = sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as book:
        projection = book.projection("p", topics=["t"], into=engine, tables=[BALANCES])(put)
        await projection.start()
        rows = projection._rows
        with engine.begin() as connection:
            rows.begin_build(connection, "m", 0.0)
            rows.make_live(connection, 2)
        with engine.begin() as connection:
            assert rows.freeze(connection, 1, "swap:late", 60.0) == []
            with pytest.raises(Fenced, match="replaced"):
                rows.check_frozen(connection, 1, "swap:late", 3)


async def test_two_classes_with_one_event_type_are_refused_when_they_are_declared(tmp_path: Path) -> None:
    def make() -> type:
        @tidebook.event_type("paid")
        class Paid(msgspec.Struct):
            amount: int

        return Paid

    one, two = make(), make()
    async with tidebook.open(tmp_path) as book:
        book.journal("t", events=[one])
        book.journal("t", events=[one])
        book.journal("u", events=[two])
        with pytest.raises(InvalidInput, match="both have the event type 'paid'"):
            book.journal("t", events=[two])
        kept = book.projection("p", topics=["t"], into=sqlite_engine(tmp_path))._types_of("t")
        assert kept is not None
        assert kept.classes == (one,)


async def test_a_rebuild_removes_the_tables_of_a_killed_one_and_fences_a_late_one(tmp_path: Path) -> None:
    engine = sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as book, replicating(book, "t"):
        projection = book.projection("p", topics=["t"], into=engine, tables=[BALANCES])(put)
        await book.journal("t").append("x", [Event(1)])
        await replicate_and_tick(book, "t")
        async with running(projection):
            await projection.settle()
        killed = projection._rebuild()
        with engine.begin() as connection:  # the rows that a killed rebuild leaves, with an expired lease
            assert projection._rows.begin_build(connection, "killed", 0.0).last_build == 2
            create_tables(connection, killed._copy_of(2).tables.values())
        assert not (await projection.stored()).rebuilding
        late = projection._runner(killed._copy_of(2), "killed", lambda tx: None)
        assert await projection.rebuild() == 3
        assert [name for name in inspect(engine).get_table_names() if name.startswith("balances")] == ["balances"]
        with pytest.raises(Fenced, match="another rebuild"):
            await late.run_to({0: (2**62,)})
        with engine.connect() as connection:
            assert projection._rows.abandoned_builds(connection, projection._rows.required_state(connection)) == []
        assert balances(engine) == {"t/x/1": 1}


async def test_waiting_for_a_parked_event_raises_its_number_and_the_reason(tmp_path: Path) -> None:
    engine = sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as book, replicating(book, "accounts"):
        accounts = book.decider("accounts", Account, events=EVENTS)

        @book.projection("p", topics=["accounts"], into=engine, tables=[BALANCES], retries=0, on_failure="park")
        def projection(tx: Any, event: Any) -> None:
            if event.data.amount == 3:
                raise ValueError("three")
            add(tx, event)

        async with running(projection):
            await projection.wait_for(await accounts.execute("a", Deposit(1)))
            done = await accounts.execute("a", Deposit(3))
            with pytest.raises(EventParked, match=r"accounts/a/2: ValueError: three.*--app"):
                await projection.wait_for(done)
            await projection.wait_for(await accounts.execute("a", Deposit(4)))
            await accounts.journal.purge("a")
            await projection.wait_for(await accounts.execute("a", Deposit(1)))
            await projection.wait_for(await accounts.execute("a", Deposit(5)))  # number 2 of another journal


async def test_a_projection_that_has_applied_nothing_has_no_time(tmp_path: Path) -> None:
    engine = sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as book:
        projection = book.projection("p", topics=["t"], into=engine)(put)
        await book.journal("t").append("x", [Event(1)])  # nothing replicates the topic, so there is no horizon
        async with running(projection), asyncio.timeout(20):
            while "[[-1],{}]" not in await stored_positions(projection):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert (await projection.stored()).time_ms is None
            assert {each.time_ms for each in (await projection.stored()).slices} == {None}


async def stored_positions(projection: Any) -> list[str]:
    await projection.start()
    return [each.position for each in await projection._engine.run(lambda c: projection._rows.slices(c, 1))]


async def test_a_member_whose_lease_ends_while_it_is_renewed_still_gets_its_slices(tmp_path: Path) -> None:
    engine = sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as book:
        projection = book.projection("p", topics=["t"], into=engine, tables=[BALANCES])(put)
        await projection.start()
        with engine.begin() as connection:
            assert len(projection._rows.rebalance(connection, 1, "slow", -1.0)) == 16


async def test_the_leases_of_a_dead_process_expire_although_the_clock_was_set_back(tmp_path: Path) -> None:
    engine = sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as book:
        await book.journal("t").append("x", [Event(1)])
        await replicate_and_tick(book, "t")
        projection = book.projection("p", topics=["t"], into=engine, tables=[BALANCES])(put)
        await projection.start()
        rows = projection._rows
        with engine.begin() as connection:
            assert len(rows.rebalance(connection, 1, "dead", 10.0)) == 16
            rows.begin_build(connection, "dead rebuild", 10.0)
            for table in (SLICE, MEMBER):  # and then the clock is set back by an hour
                connection.execute(table.update().values(lease_until=table.c.lease_until + 3600))
        assert not (await projection.stored()).rebuilding
        async with running(projection), asyncio.timeout(20):
            await projection.settle()
        assert balances(engine) == {"t/x/1": 1}
