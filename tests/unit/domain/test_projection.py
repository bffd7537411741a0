"""Projections on SQLite: handlers, exactly-once application, slices, failures, reading one's own write, rebuilds."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

import tidebook
from tests.unit.domain.bank import EVENTS, Account, Deposit, Deposited, Withdraw
from tests.unit.domain.projecting import (
    BALANCES,
    METADATA,
    add,
    add_async,
    async_sqlite_engine,
    balances,
    replicate_and_tick,
    replicating,
    running,
    sqlite_engine,
)
from tidebook.core.errors import InvalidInput, NotFound, ProjectionStopped, Unavailable
from tidebook.core.event import Event
from tidebook.domain.event_source import slice_of
from tidebook.replication.inline import replicate_to_end
from tidebook.tags import horizon
from tidebook.tags.horizon import HorizonStatus, read_horizon


@pytest.mark.parametrize("form", ["sync", "async engine", "async handler", "async both"])
async def test_every_event_is_applied_once_and_a_writer_can_wait_for_its_own_write(tmp_path: Path, form: str) -> None:
    engine = sqlite_engine(tmp_path)
    into: Any = async_sqlite_engine(tmp_path) if form in ("async engine", "async both") else engine
    handler: Any = add_async if form == "async both" else add

    async def awaiting(tx: Any, event: Any) -> None:
        await asyncio.sleep(0)
        add(tx, event)

    async with tidebook.open(tmp_path) as book, replicating(book, "accounts"):
        accounts = book.decider("accounts", Account, events=EVENTS)
        projection = book.projection("balances", topics=["accounts"], into=into, tables=[BALANCES])
        projection(awaiting if form == "async handler" else handler)
        async with running(projection):
            for n in range(5):
                done = await accounts.execute(f"a-{n % 2}", Deposit(n + 1))
                await projection.wait_for(done)
                assert balances(engine)[f"a-{n % 2}"] == done.state.balance
            status = projection.status()
            assert (status.running, len(status.slices), status.events, status.stopped) == (True, 16, 5, {})
        assert not projection.status().running
    if into is not engine:
        await into.dispose()


async def test_each_type_has_one_handler_and_other_types_are_not_decoded(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        engine, seen = sqlite_engine(tmp_path), list[Any]()
        projection = book.projection("seen", topics=["accounts"], into=engine, events=EVENTS)

        @projection.on(Deposited)
        def deposited(tx: Any, event: Any) -> None:
            seen.append((event.topic, event.id, event.seq_nr, event.data))

        with pytest.raises(InvalidInput, match="two handlers"):
            projection.on("deposited")(deposited)
        await book.journal("accounts").append("a-1", [Event({}, type="unknown"), Event(5)])
        await book.journal("accounts", events=EVENTS).append("a-1", [Deposited(7)])
        await replicate_and_tick(book, "accounts")
        async with running(projection):
            await projection.settle()
        assert seen == [("accounts", "a-1", 3, Deposited(7))]


async def test_events_of_tags_are_each_delivered_once_and_in_order(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        engine, seen = sqlite_engine(tmp_path), list[Any]()

        @book.projection("tagged", tags=["paid", "sent"], into=engine)
        def tagged(tx: Any, event: Any) -> None:
            seen.append((event.topic, event.id, event.seq_nr, event.data))

        for n in range(6):
            tags = [{"paid"}, {"sent"}, {"paid", "sent"}, {"other"}, set(), {"paid"}][n]
            await book.journal(f"t-{n % 2}").append("a", [Event(n, tags=tags)])
        await replicate_and_tick(book, "t-0", "t-1")
        async with running(tagged):
            await tagged.settle()
            await book.journal("t-1").append("a", [Event(9, tags={"sent"})])
            await replicate_and_tick(book, "t-0", "t-1")
            await tagged.settle()
        assert sorted(data for *_, data in seen) == [0, 1, 2, 5, 9]
        for topic in ("t-0", "t-1"):
            numbers = [seq_nr for name, _, seq_nr, _ in seen if name == topic]
            assert numbers == sorted(numbers)


async def test_several_topics_are_merged(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        engine, seen = sqlite_engine(tmp_path), list[Any]()

        @book.projection("merged", topics=["t-0", "t-1"], into=engine)
        def merged(tx: Any, event: Any) -> None:
            seen.append((event.topic, event.id, event.data))

        for n in range(40):
            await book.journal(f"t-{n % 2}").append(f"a-{n % 3}", [Event(n)])
        await replicate_and_tick(book, "t-0", "t-1")
        async with running(merged):
            await merged.settle()
        assert sorted(data for *_, data in seen) == list(range(40))
        for key in {each[:2] for each in seen}:
            of_key = [data for *at, data in seen if tuple(at) == key]
            assert of_key == sorted(of_key)


async def test_two_processes_share_the_slices_and_redistribute_them_while_they_run(tmp_path: Path) -> None:
    engine = sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as one, tidebook.open(tmp_path) as two, replicating(one, "accounts"):
        accounts = one.decider("accounts", Account, events=EVENTS)
        first, second = (
            book.projection("balances", topics=["accounts"], into=engine, tables=[BALANCES], events=EVENTS)(add)
            for book in (one, two)
        )

        async def write(count: int) -> list[Any]:
            return [await accounts.execute(f"a-{n % 20}", Deposit(1)) for n in range(count)]

        async with running(first):
            await write(30)
            async with running(second):
                async with asyncio.timeout(20):
                    while len(second.status().slices) != 8:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                for done in (await write(60))[-20:]:
                    await first.wait_for(done)
                assert second.status().events > 0
            for done in (await write(30))[-20:]:
                await first.wait_for(done)
            assert len(first.status().slices) == 16
        assert sum(balances(engine).values()) == 120


async def test_a_zombie_never_applies_a_batch_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as book:
        await book.journal("accounts", events=EVENTS).append("a-1", [Deposited(5)])
        await replicate_and_tick(book, "accounts")
        paused, go_on = asyncio.Event(), asyncio.Event()
        slow = book.projection("balances", topics=["accounts"], into=engine, tables=[BALANCES], events=EVENTS)(add)
        slow._settings = slow._settings.__class__(slices=16, retries=1, on_failure="stop", lease_s=0.2)
        apply = slow._engine.apply

        async def pausing(*args: Any) -> None:
            paused.set()
            await go_on.wait()
            await apply(*args)

        monkeypatch.setattr(slow._engine, "apply", pausing)
        other = book.projection("balances", topics=["accounts"], into=engine, events=EVENTS)(add)
        async with running(slow):
            await paused.wait()
            await asyncio.sleep(0.3)  # leases expire by the clock of the database
            async with running(other):
                await other.settle()
                assert balances(engine) == {"a-1": 5}
                go_on.set()
                await slow.settle()
        assert balances(engine) == {"a-1": 5}


# ---- failures


async def test_a_handler_that_always_fails_stops_only_its_slice_and_is_reported(tmp_path: Path) -> None:
    engine = sqlite_engine(tmp_path)
    failing = True
    async with tidebook.open(tmp_path) as book, replicating(book, "accounts"):
        accounts = book.decider("accounts", Account, events=EVENTS)

        @book.projection("balances", topics=["accounts"], into=engine, tables=[BALANCES], retries=2)
        def projection(tx: Any, event: Any) -> None:
            if failing and event.id == "bad" and event.seq_nr == 2:
                raise ValueError("the handler is broken")
            add(tx, event)

        for n in range(20):
            await accounts.execute(f"a-{n}", Deposit(1))
        bad, *_ = [await accounts.execute("bad", Deposit(1)) for _ in range(3)][::-1]
        async with running(projection):
            with pytest.raises(ProjectionStopped, match="accounts/bad/2: ValueError: the handler is broken"):
                await projection.wait_for(bad)
            stored = await projection.stored()
            [stopped] = [each for each in stored.slices if each.error]
            assert stopped.failed_event == "accounts/bad/2"
            assert balances(engine)["bad"] == 1
            good = [n for n in range(20) if slice_of("accounts", f"a-{n}", 16) != stopped.slice]
            assert len(good) > 10
            for n in range(20):
                done = await accounts.execute(f"a-{n}", Deposit(1))
                if n in good:
                    await projection.wait_for(done)
            failing = False
            assert await projection.resume() == ["accounts/bad/2"]
            await projection.wait_for(bad)
        assert balances(engine) == {f"a-{n}": 2 for n in range(20)} | {"bad": 3}


async def test_a_failing_event_can_be_skipped(tmp_path: Path) -> None:
    engine = sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as book, replicating(book, "accounts"):
        accounts = book.decider("accounts", Account, events=EVENTS)

        @book.projection("balances", topics=["accounts"], into=engine, tables=[BALANCES], retries=0)
        def projection(tx: Any, event: Any) -> None:
            tx.execute(text("SELECT 1" if event.seq_nr != 2 else "SELECT nonsense FROM nothing"))
            add(tx, event)

        done, *_ = [await accounts.execute("a-1", Deposit(1)) for _ in range(3)][::-1]
        async with running(projection):
            with pytest.raises(ProjectionStopped, match="nothing"):
                await projection.wait_for(done)
            assert await projection.skip() == ["accounts/a-1/2"]
            await projection.wait_for(done)
            [parked] = (await projection.stored()).parked
            assert parked.event == "accounts/a-1/2"
            assert await projection.rebuild() == 2  # the rebuild skips the event too
            assert [each.event for each in (await projection.stored()).parked] == ["accounts/a-1/2"]
        assert balances(engine) == {"a-1": 2}


async def test_a_failing_event_is_parked_if_so_configured(tmp_path: Path) -> None:
    engine = sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as book:

        @book.projection("p", topics=["accounts"], into=engine, tables=[BALANCES], retries=1, on_failure="park")
        def projection(tx: Any, event: Any) -> None:
            if event.data == 3:
                raise ValueError("three")
            tx.execute(BALANCES.insert().values(id=str(event.data), amount=1))

        await book.journal("accounts").append("a-1", [Event(n) for n in range(6)])
        await replicate_and_tick(book, "accounts")
        async with running(projection):
            await projection.settle()
            [parked] = (await projection.stored()).parked
            assert (parked.event, parked.error) == ("accounts/a-1/4", "ValueError: three")
        assert sorted(balances(engine)) == ["0", "1", "2", "4", "5"]


async def test_an_event_of_an_unknown_type_stops_its_slice(tmp_path: Path) -> None:
    engine = sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as book:
        projection = book.projection("p", topics=["accounts"], into=engine, events=EVENTS, tables=[BALANCES])(add)
        await book.journal("accounts").append("a-1", [Event({"amount": 1}, type="deposited", version=9)])
        await replicate_and_tick(book, "accounts")
        async with running(projection):
            with pytest.raises(ProjectionStopped, match="knows version 1"):
                await projection.settle()


# ---- commands


async def test_a_paused_projection_waits_until_it_is_resumed(tmp_path: Path) -> None:
    engine = sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as book, replicating(book, "accounts"):
        accounts = book.decider("accounts", Account, events=EVENTS)
        projection = book.projection("balances", topics=["accounts"], into=engine, tables=[BALANCES])(add)
        with pytest.raises(NotFound, match="never started"):
            await projection.pause()
        async with running(projection):
            await projection.wait_for(await accounts.execute("a-1", Deposit(1)))
            await projection.pause()
            await asyncio.sleep(0.2)
            done = await accounts.execute("a-1", Deposit(1))
            with pytest.raises(Unavailable):
                await projection.wait_for(done, timeout_s=0.3)
            assert (await projection.stored()).paused
            await projection.resume()
            await projection.wait_for(done)
        assert balances(engine) == {"a-1": 2}


@pytest.mark.parametrize(
    "given",
    [{}, {"topics": []}, {"topics": "accounts"}, {"tags": "paid"}, {"tags": [""]}, {"topics": ["a"], "slices": 0}],
    ids=repr,
)
async def test_invalid_arguments_are_refused(tmp_path: Path, given: Any) -> None:
    async with tidebook.open(tmp_path) as book:
        with pytest.raises(InvalidInput):
            book.projection("p", into=sqlite_engine(tmp_path), **given)
        with pytest.raises(InvalidInput, match="engine"):
            book.projection("p", topics=["a"], into="sqlite://")
        with pytest.raises(InvalidInput, match="no handler"):
            await book.projection("p", topics=["a"], into=sqlite_engine(tmp_path)).run()


# ---- rebuild


async def test_a_rebuild_replaces_the_tables_without_a_gap_under_load(tmp_path: Path) -> None:
    engine = sqlite_engine(tmp_path)
    factor = 1

    def scaled(tx: Any, event: Any) -> None:
        table = tx.table(BALANCES)
        done = tx.execute(
            table.update().where(table.c.id == event.id).values(amount=table.c.amount + event.data.amount * factor)
        )
        if not done.rowcount:
            tx.execute(table.insert().values(id=event.id, amount=event.data.amount * factor))

    async with tidebook.open(tmp_path) as book, replicating(book, "accounts"):
        accounts = book.decider("accounts", Account, events=EVENTS)
        projection = book.projection("balances", topics=["accounts"], into=engine, tables=[BALANCES])(scaled)
        written, seen, stop = 0, list[int](), asyncio.Event()

        async def write() -> None:
            nonlocal written
            while not stop.is_set():
                await accounts.execute(f"a-{written % 7}", Deposit(1))
                written += 1
                seen.append(sum(balances(engine).values()))

        async with running(projection):
            await projection.wait_for(await accounts.execute("a-0", Deposit(1)))
            writing = asyncio.create_task(write())
            await asyncio.sleep(0.2)
            build = await projection.rebuild()
            await asyncio.sleep(0.2)
            stop.set()
            await writing
            for n in range(7):
                await projection.wait_for(await accounts.execute(f"a-{n}", Deposit(1)))
            assert (await projection.stored()).build == build == 2
        assert sum(balances(engine).values()) == written + 8
        assert seen == sorted(seen)  # the table always existed, and never lost a row
        with engine.connect() as connection:
            names = {name for (name,) in connection.execute(text("SELECT name FROM sqlite_master WHERE type='table'"))}
        assert {name for name in names if name.startswith("balances")} == {"balances"}


@pytest.mark.parametrize("on_failure", ["stop", "park"])
async def test_a_rebuild_refuses_a_handler_that_writes_to_the_live_tables(tmp_path: Path, on_failure: Any) -> None:
    engine = sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path) as book:

        @book.projection("p", topics=["accounts"], into=engine, tables=[BALANCES], on_failure=on_failure)
        def projection(tx: Any, event: Any) -> None:
            tx.execute(BALANCES.insert().values(id=uuid.uuid4().hex, amount=1))

        await book.journal("accounts").append("a-1", [Event(n) for n in range(6)])
        await replicate_and_tick(book, "accounts")
        async with running(projection):
            await projection.settle()
        with pytest.raises(Exception, match=r"tx\.table"):
            await projection.rebuild()
        assert len(balances(engine)) == 6
        stored = await projection.stored()
        assert (stored.build, stored.rebuilding) == (1, False)


async def test_a_rebuild_applies_everything_that_was_replicated_although_nothing_ever_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = sqlite_engine(tmp_path)
    monkeypatch.setattr(horizon, "STALL_MS", 0)
    reported: asyncio.Queue[HorizonStatus] = asyncio.Queue()
    async with tidebook.open(tmp_path) as book:
        projection = book.projection("p", topics=["accounts"], into=engine, tables=[BALANCES])(add)
        monkeypatch.setattr(projection._wait, "_report", reported.put_nowait)
        for n in range(3):
            await book.decider("accounts", Account, events=EVENTS).execute(f"a-{n}", Deposit(1))
        await replicate_to_end(book.log, book.store)  # without ticks, so that there is no horizon
        rebuilding = asyncio.create_task(projection.rebuild())
        missing = (await reported.get()).describe()
        assert "was never replicated: run 'tidebook up' or 'tidebook pipeline replicate'" in missing
        assert not rebuilding.done()
        async with replicating(book, "accounts"):
            assert await rebuilding == 2
        assert balances(engine) == {f"a-{n}": 1 for n in range(3)}


async def test_a_rebuild_applies_the_event_at_the_horizon(tmp_path: Path) -> None:
    engine, settings = sqlite_engine(tmp_path), tmp_path / "tidebook.toml"
    settings.write_text("[journal]\npartitions = 1\n")
    async with tidebook.open(settings) as book:
        projection = book.projection("p", topics=["accounts"], into=engine, tables=[BALANCES])(add)
        await book.decider("accounts", Account, events=EVENTS).execute("a", Deposit(1))
        await replicate_to_end(book.log, book.store)
        assert (await read_horizon(book.store)).time_ms > 0
        rebuilding = asyncio.create_task(projection.rebuild())
        async with asyncio.timeout(30):
            await book.log.wait("accounts", 0, offset=1)  # the rebuild's tick
        async with replicating(book, "accounts"):
            assert await rebuilding == 2
        assert balances(engine) == {"a": 1}


async def test_a_rebuild_of_topics_that_do_not_exist_does_not_wait(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        projection = book.projection("p", topics=["a"], into=sqlite_engine(tmp_path), tables=[BALANCES])(add)
        assert await projection.rebuild() == 2


async def test_a_rebuild_with_another_source_needs_no_new_event(tmp_path: Path) -> None:
    engine = sqlite_engine(tmp_path)
    async with tidebook.open(tmp_path, replicate=True) as book:
        first = book.projection("p", topics=["accounts"], into=engine, tables=[BALANCES])(add)
        done = await book.decider("accounts", Account, events=EVENTS).execute("a", Deposit(1))
        async with running(first):
            await first.wait_for(done)
            await first.settle()
        other = book.projection("p", topics=["accounts", "others"], into=engine, tables=[BALANCES])(add)
        assert await other.rebuild() == 2
        assert balances(engine) == {"a": 1}


async def test_a_rebuild_needs_tables(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        with pytest.raises(InvalidInput, match="tables="):
            await book.projection("p", topics=["a"], into=sqlite_engine(tmp_path))(add).rebuild()


def test_a_blocking_book_runs_projections(tmp_path: Path) -> None:
    METADATA.create_all(sqlite_engine(tmp_path))
    with tidebook.open_sync(tmp_path) as book:
        projection = book.projection("p", topics=["accounts"], into=sqlite_engine(tmp_path))(add)
        assert not projection.status().running
        with pytest.raises(NotFound):
            projection.stored()
        assert Withdraw(1).amount == 1
