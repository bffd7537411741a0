"""Journals, queues and subscriptions are generic: the type checker of `./dev check` fails here if a type is lost.

Each `type: ignore` is a mistake that the type checker finds; an ignore without a mistake is an error too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_type

import msgspec
import pydantic
import pytest

import tidebook
from tidebook.core.errors import InvalidInput, UnknownEventType
from tidebook.core.event import Event
from tidebook.domain.decider import Decider
from tidebook.domain.typed_event import TypedEvent
from tidebook.domain.typed_journal import TypedJournal
from tidebook.queue.job import Job
from tidebook.queue.queue import Queue
from tidebook.queue.sync import SyncQueue
from tidebook.replication.inline import replicate_to_end
from tidebook.tags.event import TaggedEvent
from tidebook.tags.subscription import Subscription


@dataclass(frozen=True)
class Deposited:
    amount: int


class Withdrawn(msgspec.Struct, frozen=True):
    amount: int


class Mail(pydantic.BaseModel):
    to: str


async def test_the_events_of_a_journal_have_their_class(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts = book.journal("accounts", events=[Deposited])
        assert_type(accounts, TypedJournal[Deposited])
        await accounts.append("a", [Deposited(5)])
        with pytest.raises(InvalidInput):
            await accounts.append("a", [5])  # type: ignore[list-item]
        async for event in accounts.read("a"):
            assert_type(event, TypedEvent[Deposited])
            assert assert_type(event.data, Deposited) == Deposited(5)


class Account(msgspec.Struct):
    balance: int = 0

    def deposit(self, amount: int) -> Deposited:
        return Deposited(amount)

    def evolve(self, event: Deposited) -> None:
        self.balance += event.amount


class Total:
    @staticmethod
    def initial() -> int:
        return 0

    @staticmethod
    def decide(command: int, state: int) -> list[Deposited]:
        return [Deposited(command)]

    @staticmethod
    def evolve(state: int, event: Deposited) -> int:
        return state + event.amount


async def test_the_state_of_a_decider_has_its_class(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Account, snapshot_every=10)
        assert_type(accounts, Decider[Account])
        done = await accounts.execute("a", Account.deposit, 5)
        assert assert_type(done.state, Account).balance == 5
        totals = book.decider("totals", Total)
        assert_type(totals, Decider[int])
        await totals.execute("t", 3)
        assert assert_type((await totals.load("t")).state, int) == 3
        with pytest.raises(TypeError):
            book.decider("accounts", Account, snapshots=10)  # type: ignore[call-overload]


async def test_the_jobs_of_a_queue_have_the_class_of_its_fields(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        mails = book.queue("mails", fields=Mail)
        assert_type(mails, Queue[Mail])
        await mails.put(Mail(to="ada"))
        with pytest.raises(InvalidInput):
            await mails.put(Deposited(5))  # type: ignore[arg-type]
        [job] = await mails.claim()
        assert_type(job, Job[Mail])
        assert assert_type(job.data, Mail) == Mail(to="ada")
        await mails.done(job)
        anything = book.queue("anything")
        assert_type(anything, Queue[Any])
        await anything.put({"to": "ada"})


def test_the_jobs_of_a_blocking_queue_have_the_class_of_its_fields(tmp_path: Path) -> None:
    with tidebook.open_sync(tmp_path) as book:
        mails = book.queue("mails", fields=Mail)
        assert_type(mails, SyncQueue[Mail])
        mails.put(Mail(to="ada"))
        [job] = mails.claim()
        assert assert_type(job.data, Mail) == Mail(to="ada")


async def test_the_events_of_a_subscription_have_their_class(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        await book.journal("accounts", events=[Deposited]).append("a", [Event(Deposited(5), tags={"t"})])
        await replicate_to_end(book.log, book.store)
        typed = book.tags.subscribe("t", "typed", events=[Deposited], follow=False)
        assert_type(typed, Subscription[Deposited])
        async with typed as events:
            async for event in events:
                assert_type(event, TaggedEvent[Deposited])
                assert assert_type(event.payload, Deposited) == Deposited(5)
                await events.commit(event)
        async with book.tags.subscribe("t", "raw", follow=False) as raw:
            assert_type(raw, Subscription[Any])
            assert [event.payload async for event in raw] == [{"amount": 5}]
        other = book.tags.subscribe("t", "other", events=[Withdrawn], follow=False)
        async with other as events_of_others:
            with pytest.raises(UnknownEventType, match="accounts/a"):
                assert [event.payload async for event in events_of_others] == []
