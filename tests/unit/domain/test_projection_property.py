"""A read model is the fold of the journals, whatever the batches, the lag, the owners of slices and the crashes."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from sqlalchemy import Connection

import tidebook
from tests.unit.domain.projecting import BALANCES, balances, replicate_and_tick, replicating, running, sqlite_engine
from tidebook.core.event import Event
from tidebook.domain.log_topic_source import LogTopicSource
from tidebook.domain.projection import Projection
from tidebook.domain.projection_runner import Build, SliceRunner
from tidebook.tags.horizon import Horizons
from tidebook.testing.replicating import replicate
from tidebook.wiring.book import Book

TOPIC, SLICES, MEMBERS = "t", 3, ("m-0", "m-1", "m-2")


class Crash(BaseException):
    """An error that a step raises where a process would die; no error handler may catch it."""


class Append(msgspec.Struct, frozen=True):
    id: int
    amount: int


class Replicate(msgspec.Struct, frozen=True):
    """Replicate a few records or, with `tick`, all of them, and bring them below the horizon."""

    records: int
    tick: bool


class Run(msgspec.Struct, frozen=True):
    """Let a member renew its lease and process batches; it may die before or after a commit."""

    member: int
    batch: int
    crash: str | None


class Leave(msgspec.Struct, frozen=True):
    """Let a member leave, so that others take its slices."""

    member: int


class Truncate(msgspec.Struct, frozen=True):
    """Let the log lose all replicated records."""


STEPS = st.lists(
    st.one_of(
        st.builds(Append, st.integers(0, 4), st.integers(1, 9)),
        st.builds(Replicate, st.integers(1, 4), st.booleans()),
        st.builds(Run, st.integers(0, 2), st.integers(1, 3), st.sampled_from([None, "before", "after"])),
        st.builds(Leave, st.integers(0, 2)),
        st.builds(Truncate),
    ),
    max_size=30,
)


def apply(tx: Any, event: Any) -> None:
    """Apply an event in a way that depends on the order: append a digit."""
    table = tx.table(BALANCES)
    change = table.update().where(table.c.id == event.id).values(amount=table.c.amount * 3 + event.data)
    if not tx.execute(change).rowcount:
        tx.execute(table.insert().values(id=event.id, amount=event.data))


class Members:
    """The members of one projection, whose runners are stepped by hand."""

    def __init__(self, book: Book, engine: Any, *, from_log: bool) -> None:
        self._book = book
        self._engine = engine
        self._from_log = from_log
        self._runners: dict[str, SliceRunner] = {}
        self.projection = self.declare()

    def declare(self) -> Projection:
        """Return the projection as another process would declare it."""
        book = self._book
        made = book.projection("p", topics=[TOPIC], into=self._engine, tables=[BALANCES], slices=SLICES)(apply)
        if self._from_log:
            made._source = LogTopicSource(book.log, book.store, Horizons(book.store), frozenset({TOPIC}))
        return made

    async def run(self, step: Run) -> None:
        name = MEMBERS[step.member]
        runner = self._runners.get(name)
        if runner is None:
            runner = self._runners[name] = self.declare()._runner(Build(1, {}), name, lambda tx: None)
        runner.progress.batch_max = step.batch
        commit = runner._commit

        async def dying(*arguments: Any) -> None:
            if step.crash == "after":
                await commit(*arguments)
            raise Crash

        if step.crash is not None:
            runner._commit = dying  # type: ignore[method-assign, assignment]
        try:
            runner.renew_soon()
            await runner._renew()
            await runner._round()
        except Crash:
            del self._runners[name]  # its lease has expired when the next member renews its own
            await self._expire(name)
        finally:
            runner._commit = commit  # type: ignore[method-assign]

    async def leave(self, member: int) -> None:
        runner = self._runners.pop(MEMBERS[member], None)
        if runner is not None:
            await runner._leave()

    async def _expire(self, name: str) -> None:
        def expire(connection: Connection) -> None:
            self.projection._rows.leave(connection, 1, name)  # as others do once the lease has expired

        await self.projection._engine.run(expire)


async def replay(folder: Path, steps: list[Any], *, from_log: bool) -> None:
    engine = sqlite_engine(folder)
    expected: dict[str, int] = {}
    async with tidebook.open(folder / "book") as book:
        journal = book.journal(TOPIC)
        await journal.create()
        members = Members(book, engine, from_log=from_log)
        await members.projection.start()
        for step in steps:
            match step:
                case Append():
                    id = f"a-{step.id}"
                    await journal.append(id, [Event(step.amount)])
                    expected[id] = expected.get(id, 0) * 3 + step.amount
                case Replicate():
                    if step.tick:
                        await replicate_and_tick(book, TOPIC)
                    else:
                        await replicate(book.log, book.store, TOPIC, batch_records=step.records)
                case Run():
                    await members.run(step)
                case Leave():
                    await members.leave(step.member)
                case Truncate():
                    for partition, pointer in (await book.store.pointers(TOPIC)).items():
                        await book.log.truncate(TOPIC, partition, before=pointer.position.offset + 1)
        for number in range(3):
            await members.leave(number)
        final = members.projection
        async with replicating(book, TOPIC), running(final), asyncio.timeout(20):
            for _ in range(2):  # the second horizon is above all appended events
                await replicate_and_tick(book, TOPIC)
                await final.settle()
        note(f"{final.status()}")
        assert balances(engine) == expected
    engine.dispose()


@pytest.mark.parametrize("from_log", [False, True], ids=["store", "log"])
def test_a_read_model_is_the_fold_whatever_the_batching_lag_division_and_crashes(
    from_log: bool, long_form: bool
) -> None:
    @settings(
        max_examples=300 if long_form else 10,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,) if not long_form else tuple(Phase),
    )
    @given(STEPS)
    def holds(steps: list[Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(replay(Path(folder), steps, from_log=from_log))

    holds()
