"""Process managers: an event causes commands, queue entries and outbox messages exactly once."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import create_engine

import tidebook
from tests.unit.domain.bank import EVENTS, Account, Deposit, Refused, Withdraw, Withdrawn
from tests.unit.domain.projecting import replicate_and_tick, replicating, running
from tidebook.core.errors import InvalidInput, OutcomeUnknown, ProjectionStopped, Unavailable, UnknownVersion
from tidebook.core.event import Event
from tidebook.domain import process as process_module
from tidebook.domain import projection_runner
from tidebook.domain.decider import COMMANDS_MAX
from tidebook.domain.log_topic_source import LogTopicSource
from tidebook.domain.process import ENTITY_COMMANDS_MAX
from tidebook.domain.projection_runner import BATCH_FIRST
from tidebook.queue.queue import Queue
from tidebook.tags.horizon import Horizons
from tidebook.wiring.topics import delete_topic


@tidebook.event_type("transfer-started")
class TransferStarted(msgspec.Struct, frozen=True):
    source: str
    target: str
    amount: int


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projection_runner, "RETRY_FIRST_S", 0.001)


async def test_an_event_causes_commands_entries_and_timeouts(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Account, events=EVENTS)
        transfers = book.journal("transfers", events=[TransferStarted])

        @book.process("transfers", topics=["transfers"])
        def process(effects: Any, event: Any) -> None:
            started = event.data
            effects.execute(accounts, started.source, Withdraw(started.amount), refusals=(Refused,))
            effects.execute(accounts, started.target, Deposit(started.amount))
            effects.put("mail", {"transfer": event.id})
            effects.put("timeouts", {"transfer": event.id}, process_at=event.timestamp + timedelta(hours=1))

        await accounts.execute("a", Deposit(10))
        for n in range(3):
            await transfers.append(f"t-{n}", [TransferStarted("a", "b", 2)])
        await transfers.append("t-3", [TransferStarted("poor", "b", 2)])
        await replicate_and_tick(book, "transfers")
        async with running(process):
            await process.settle()
        assert (await accounts.load("a")).state.balance == 4
        assert (await accounts.load("b")).state.balance == 8
        jobs = await book.queue("mail").claim(limit=10, lease=timedelta(minutes=1))
        assert sorted(job.data["transfer"] for job in jobs) == ["t-0", "t-1", "t-2", "t-3"]
        assert await book.queue("timeouts").claim(limit=10, lease=timedelta(minutes=1)) == []
        assert (await book.queue("timeouts").status()).waiting == 4
        with pytest.raises(InvalidInput, match="cannot be rebuilt"):
            await process.rebuild()


async def test_a_repeated_batch_causes_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Account, events=EVENTS)

        def make() -> Any:
            made = book.process("cashback", topics=["accounts"])

            @made.on(Withdrawn)
            async def withdrawn(effects: Any, event: Any) -> None:
                effects.execute(accounts, f"bonus-{event.id}", Deposit(1))
                effects.put("mail", event.id)

            return made

        for n in range(4):
            await accounts.execute(f"a-{n}", Deposit(5))
            await accounts.execute(f"a-{n}", Withdraw(5))
        await replicate_and_tick(book, "accounts")

        await crash_before_the_offset(make(), monkeypatch)
        assert (await accounts.load("bonus-a-0")).state.balance == 1
        process = make()
        async with running(process):
            await process.settle()
            await replicate_and_tick(book, "accounts")
            await process.settle()
        for n in range(4):
            assert (await accounts.load(f"bonus-a-{n}")).state.balance == 1
        jobs = await book.queue("mail").claim(limit=10, lease=timedelta(minutes=1))
        assert sorted(job.data for job in jobs) == ["a-0", "a-1", "a-2", "a-3"]


async def test_a_refused_command_stops_the_slice(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Account, events=EVENTS)

        @book.process("taxes", topics=["accounts"], retries=1)
        def taxes(effects: Any, event: Any) -> None:
            effects.execute(accounts, "nobody", Withdraw(1))

        await accounts.execute("a-1", Deposit(5))
        await replicate_and_tick(book, "accounts")
        async with running(taxes):
            with pytest.raises(ProjectionStopped, match="balance is 0"):
                await taxes.settle()


async def test_a_record_of_a_later_build_stops_the_process_and_leaves_the_event_to_that_build(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Account, events=EVENTS)
        seen = list[str]()

        def make(earlier: bool) -> Any:
            @book.process("taxes", topics=["accounts"], retries=0)
            def taxes(effects: Any, event: Any) -> None:
                if earlier:
                    raise UnknownVersion("a journal's record", version=2, known=1)
                seen.append(event.id)

            return taxes

        await accounts.execute("a-1", Deposit(5))
        await replicate_and_tick(book, "accounts")
        with pytest.raises(UnknownVersion):
            await make(earlier=True).run()
        later = make(earlier=False)
        async with running(later):
            await later.settle()
        assert seen == ["a-1"]


async def test_messages_are_published_with_the_offset(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Account, events=EVENTS)
        engine = create_engine(f"sqlite:///{await outbox_file(book)}")

        @book.process("news", topics=["accounts"], into=engine)
        def news(effects: Any, event: Any) -> None:
            effects.publish(topic="news", key=event.id.encode(), payload=b"%d" % event.seq_nr)

        for n in range(5):
            await accounts.execute(f"a-{n % 2}", Deposit(1))
        await replicate_and_tick(book, "accounts")
        async with running(news):
            await news.settle()
        assert sum(each.waiting for each in await book.outbox.status()) == 5


async def outbox_file(book: Any) -> str:
    await book.outbox.create_tables()
    url: str = book.outbox.url
    return url.removeprefix("sqlite:///")


async def test_a_long_batch_for_one_entity_repeats_no_command(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Account, events=EVENTS)
        orders = book.journal("orders", events=[TransferStarted])
        count = COMMANDS_MAX + 50

        @book.process("pay", topics=["orders"], retries=0, on_failure="park")
        def pay(effects: Any, event: Any) -> None:
            effects.execute(accounts, "total", Deposit(1))
            if event.data.amount == count:
                effects.execute(accounts, "total", Withdraw(10 * count))

        for n in range(1, count + 1):
            await orders.append(f"o-{n % 3}", [TransferStarted("a", "b", n)])
        await replicate_and_tick(book, "orders")
        async with running(pay):
            await pay.settle()
        assert (await accounts.load("total")).state.balance == count
        assert len((await pay.stored()).parked) == 1


async def test_an_event_causes_a_bounded_number_of_commands_of_an_entity(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Account, events=EVENTS)

        @book.process("pay", topics=["orders"], retries=0)
        def pay(effects: Any, event: Any) -> None:
            for _ in range(event.data["count"]):
                effects.execute(accounts, "total", Deposit(1))

        orders = book.journal("orders")
        await orders.append("o-1", [Event({"count": ENTITY_COMMANDS_MAX}), Event({"count": ENTITY_COMMANDS_MAX + 1})])
        await replicate_and_tick(book, "orders")
        async with running(pay):
            with pytest.raises(ProjectionStopped, match="make them one command"):
                await pay.settle()
        assert (await accounts.load("total")).state.balance == ENTITY_COMMANDS_MAX


async def test_events_of_a_recreated_topic_are_different_events(tmp_path: Path) -> None:
    for balance in (1, 2, 3):  # the second and the third event have the same number and offset
        async with tidebook.open(tmp_path) as book:
            accounts = book.decider("accounts", Account, events=EVENTS)

            @book.process("pay", topics=["orders"])
            def pay(effects: Any, event: Any, accounts: Any = accounts) -> None:
                effects.execute(accounts, "total", Deposit(1))

            await book.journal("orders").append("o-1", [Event({})])
            await replicate_and_tick(book, "orders")
            async with running(pay):
                await pay.settle()
            assert (await accounts.load("total")).state.balance == balance
            await delete_topic(book.log, book.store, "orders")


@pytest.mark.parametrize("error", [Unavailable("down"), OutcomeUnknown("lost")])
@pytest.mark.parametrize("effect", ["command", "entry"])
async def test_effects_wait_for_an_unavailable_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, effect: str, error: Exception
) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts, mail, failures = book.decider("accounts", Account, events=EVENTS), book.queue("mail"), list[str]()

        @book.process("pay", topics=["orders"], retries=0, on_failure="park")
        def pay(effects: Any, event: Any) -> None:
            if effect == "command":
                effects.execute(accounts, "total", Deposit(1))
            else:
                effects.put("mail", event.id)

        def fail_at_first(target: Any, name: str) -> None:
            real = getattr(target, name)

            async def call(*args: Any, **options: Any) -> Any:
                if len(failures) < 4:
                    failures.append(name)
                    raise error
                return await real(*args, **options)

            monkeypatch.setattr(target, name, call)

        if effect == "command":
            fail_at_first(accounts, "execute")
        else:
            fail_at_first(mail, "put_once")
        await book.journal("orders").append("o-1", [Event(1)])
        await replicate_and_tick(book, "orders")
        async with running(pay):
            await pay.settle()
            assert pay.problem is None
        assert len(failures) == 4
        assert (await pay.stored()).parked == ()
        if effect == "command":
            assert (await accounts.load("total")).state.balance == 1
        else:
            assert [each.data for each in await mail.claim(limit=9, lease=timedelta(minutes=1))] == ["o-1"]


async def test_a_handler_that_raises_a_cancellation_fails_only_its_event(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        seen = list[Any]()

        @book.process("pay", topics=["orders"], retries=1)
        async def pay(effects: Any, event: Any) -> None:
            if event.id == "o-1":
                raise asyncio.CancelledError
            seen.append(event.id)

        for n in range(4):
            await book.journal("orders").append(f"o-{n}", [Event(n)])
        await replicate_and_tick(book, "orders")
        async with running(pay):
            with pytest.raises(ProjectionStopped, match="orders/o-1/1: CancelledError"):
                await pay.settle()
            async with asyncio.timeout(20):
                while not {"o-0", "o-2", "o-3"} <= set(seen):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)


class Crash(BaseException):
    """An error that ends a process manager as the death of its process would."""


async def crash_before_the_offset(process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a process manager that crashes when its effects have happened, before it stores its offset."""

    async def crash(*_: Any) -> None:
        raise Crash

    monkeypatch.setattr(process._engine, "apply", crash)
    with pytest.raises(BaseException, match=r"|Crash") as caught:
        await process.run()
    assert isinstance(caught.value, Crash)


@pytest.mark.parametrize("padding", ["", "\x01" * 990], ids=["short", "long"])  # characters that JSON escapes
async def test_entries_are_put_once_although_the_log_loses_records_that_a_crashed_process_has_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, padding: str
) -> None:
    async with tidebook.open(tmp_path) as book:

        def make() -> Any:
            made = book.process("mails", topics=["orders"])
            made(lambda effects, event: effects.put("mail", f"{event.id.removesuffix(padding)}/{event.seq_nr}"))
            made._source = LogTopicSource(book.log, book.store, Horizons(book.store), frozenset({"orders"}))
            return made

        async def fill() -> None:
            for n in range(20):
                await book.journal("orders").append(f"o-{n}{padding}", [Event(n)])
            await replicate_and_tick(book, "orders")

        await fill()
        first = make()
        async with running(first):
            await first.settle()
        await fill()
        await crash_before_the_offset(make(), monkeypatch)  # the entries of the second events are put
        await fill()
        for partition, pointer in (await book.store.pointers("orders")).items():  # as retention does
            await book.log.truncate("orders", partition, before=pointer.position.offset + 1)
        monkeypatch.setattr(projection_runner, "BATCH_FIRST", 7)
        await replicate_and_tick(book, "orders")
        await crash_before_the_offset(make(), monkeypatch)  # at the jump to the scan
        second = make()
        async with replicating(book, "orders"), running(second), asyncio.timeout(30):
            await second.settle()
            await fill()
            await second.settle()
        jobs = await book.queue("mail").claim(limit=100, lease=timedelta(minutes=1))
        assert sorted(job.data for job in jobs) == sorted(
            f"o-{n}/{number}" for n in range(20) for number in (1, 2, 3, 4)
        )


async def test_a_long_batch_is_put_in_several_transactions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "ENTRIES_MAX", 10)
    async with tidebook.open(tmp_path) as book:
        sizes = list[int]()

        @book.process("mails", topics=["orders"], retries=0)
        def mails(effects: Any, event: Any) -> None:
            effects.put("mail", event.data)
            effects.put("copies", event.data)

        put_once = Queue.put_once

        async def counted(self: Any, entries: Any, **options: Any) -> Any:
            sizes.append(len(entries))
            return await put_once(self, entries, **options)

        monkeypatch.setattr(Queue, "put_once", counted)
        await book.journal("orders").append("o-1", [Event(n) for n in range(35)])
        await replicate_and_tick(book, "orders")
        async with running(mails):
            await mails.settle()
        assert sizes == [10, 10, 10, 10, 10, 10, 5, 5]
        for name in ("mail", "copies"):
            jobs = await book.queue(name).claim(limit=100, lease=timedelta(minutes=1))
            assert sorted(job.data for job in jobs) == list(range(35))


async def test_effects_that_take_longer_than_the_lease_are_finished(tmp_path: Path) -> None:
    lease_s, count = 0.5, 4
    async with tidebook.open(tmp_path) as book:
        orders = book.journal("orders", events=[TransferStarted])
        accounts = book.decider("accounts", Account, events=EVENTS)
        attempts: list[str] = []

        class SlowAccounts:
            topic = "accounts"

            async def execute(self, id: str, command: Any, *, command_id: str) -> None:
                attempts.append(command_id)
                await asyncio.sleep(lease_s)
                await accounts.execute(id, command, command_id=command_id)

        def member() -> Any:
            @book.process("pay", topics=["orders"], into=create_engine(f"sqlite:///{tmp_path / 'read.db'}"))
            def pay(effects: Any, event: Any) -> None:
                effects.execute(SlowAccounts(), "total", Deposit(1))

            pay._settings = msgspec.structs.replace(pay._settings, lease_s=lease_s)
            return pay

        for _ in range(count):
            await orders.append("o", [TransferStarted("a", "b", 1)])
        await replicate_and_tick(book, "orders")
        first, second = member(), member()
        async with running(first, second):  # each takes the slices of the other once its lease has ended
            async with asyncio.timeout(50):
                await first.settle()
        assert (await accounts.load("total")).state.balance == count
        assert len({*attempts}) == count
        # A batch that is repeated after a crash should repeat the effects of seconds only.
        assert min(each._progress.batch_max for each in (first, second)) < BATCH_FIRST
