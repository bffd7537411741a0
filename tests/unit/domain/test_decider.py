"""Deciders: commands, conflicts, cached states, snapshots, command ids, and earlier states."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest

import tidebook
from tests.unit.domain.bank import (
    EVENTS,
    Account,
    AccountState,
    Deposit,
    Deposited,
    MethodAccount,
    Open,
    Opened,
    Refused,
    Withdraw,
    Withdrawn,
)
from tidebook.core.errors import Conflict, InvalidInput, OutcomeUnknown, Truncated, Unavailable
from tidebook.core.event import Event
from tidebook.domain.scenario import scenario


async def test_a_command_appends_its_events_and_returns_the_state(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Account, events=EVENTS)
        opened = await accounts.execute("a-1", Open("ada"))
        assert (opened.state, opened.events) == (AccountState("ada", 0), [Opened("ada")])
        done = await accounts.execute("a-1", Deposit(5))
        assert (done.state, done.events, done.first, done.last) == (AccountState("ada", 5), [Deposited(5)], 2, 2)
        now = await accounts.load("a-1")
        assert (now.state, now.seq_nr) == (AccountState("ada", 5), 2)
        read = [event.data async for event in book.journal("accounts", events=EVENTS).read("a-1")]
        assert read == [Opened("ada"), Deposited(5)]


async def test_a_refused_command_appends_nothing(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Account, events=EVENTS)
        with pytest.raises(Refused, match="balance is 0"):
            await accounts.execute("a-1", Withdraw(1))
        assert (await accounts.load("a-1")).seq_nr == 0


async def test_a_command_without_events_changes_nothing(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Account)
        await accounts.execute("a-1", Open("ada"))
        done = await accounts.execute("a-1", Open("bob"), command_id="c-1")
        assert (done.events, done.first, done.last, done.seq_nr, done.state.owner) == ([], None, None, 1, "ada")
        await accounts.journal.purge("a-1")
        again = await accounts.execute(
            "a-1", Open("bob"), command_id="c-1"
        )  # the command left no trace, so it is decided again
        assert (again.events, again.repeated) == ([Opened("bob")], False)


async def test_concurrent_commands_of_two_processes_all_take_effect(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as one, tidebook.open(tmp_path) as two:
        deciders = [book.decider("accounts", Account, conflicts_max=500) for book in (one, two)]
        await asyncio.gather(*(deciders[n % 2].execute(f"a-{n % 3}", Deposit(1)) for n in range(120)))
        for n in range(3):
            assert (await deciders[0].load(f"a-{n}")).state.balance == 40


async def test_a_hot_entity_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Account)
        await accounts.execute("a-1", Deposit(1))

        async def unexpected(*_: Any, **__: Any) -> None:
            raise AssertionError("the journal was read")

        monkeypatch.setattr(accounts.journal, "head", unexpected)
        for _ in range(5):
            await accounts.execute("a-1", Deposit(1))
        monkeypatch.undo()
        assert (await accounts.load("a-1")).state.balance == 6


async def test_a_refusal_for_an_outdated_state_is_decided_again(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as one, tidebook.open(tmp_path) as two:
        first, second = one.decider("accounts", Account), two.decider("accounts", Account)
        await first.execute("a-1", Deposit(1))
        await second.execute("a-1", Deposit(10))
        assert (await first.execute("a-1", Withdraw(11))).state.balance == 0
        await second.execute("a-1", Deposit(1))
        with pytest.raises(Refused, match="balance is 1"):
            await first.execute("a-1", Withdraw(2))


async def test_conflicts_are_retried_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Account, conflicts_max=3)
        tries = 0

        async def conflict(*_: Any, **__: Any) -> None:
            nonlocal tries
            tries += 1
            raise Conflict(key="a-1", expected=0, found=1)

        monkeypatch.setattr(accounts.journal, "append", conflict)
        with pytest.raises(Conflict):
            await accounts.execute("a-1", Deposit(1))
        assert tries == 4


async def test_a_cached_state_of_a_purged_journal_is_never_used(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as one, tidebook.open(tmp_path) as two:
        first, second = one.decider("accounts", Account), two.decider("accounts", Account)
        await first.execute("a-1", Deposit(100))
        await two.journal("accounts").purge("a-1")
        await second.execute("a-1", Deposit(1))  # the same number of events, another incarnation
        with pytest.raises(Refused, match="balance is 1"):
            await first.execute("a-1", Withdraw(100))
        assert (await second.load("a-1")).state.balance == 1


async def test_an_unknown_outcome_is_retried_without_a_second_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Account)
        append, failures = accounts.journal.append, 2

        async def lost(*args: Any, **given: Any) -> Any:
            nonlocal failures
            given.setdefault("retry", None)
            append_id = given["retry"].append_id if given["retry"] else b"i" * 16
            done = await append(*args, **(given if given["retry"] else {**given, "append_id": append_id}))
            if failures:
                failures -= 1
                raise OutcomeUnknown("lost", append_id=append_id, partition=0, floor=0, epoch=1)
            return done

        monkeypatch.setattr(accounts.journal, "append", lost)
        done = await accounts.execute("a-1", Deposit(5))
        assert (done.state.balance, done.last) == (5, 1)
        monkeypatch.undo()
        assert (await accounts.load("a-1")).seq_nr == 1
        failures = 99
        monkeypatch.setattr(accounts.journal, "append", lost)
        with pytest.raises(OutcomeUnknown):
            await accounts.execute("a-2", Deposit(5))
        monkeypatch.undo()
        assert (await accounts.load("a-2")).state.balance == 5


async def test_a_command_that_may_be_appended_is_not_reported_as_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unavailable says that nothing was changed, but an attempt before may have been written."""
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Account)
        append, head = accounts.journal.append, accounts.journal.head

        async def lost_and_refused(*args: Any, **given: Any) -> Any:
            if given.get("retry") is not None:
                raise Unavailable("refused on purpose")
            await append(*args, **{**given, "append_id": b"i" * 16})
            raise OutcomeUnknown("lost", append_id=b"i" * 16, partition=0, floor=0, epoch=1)

        monkeypatch.setattr(accounts.journal, "append", lost_and_refused)
        with pytest.raises(OutcomeUnknown):
            await accounts.execute("a-1", Deposit(5))
        monkeypatch.undo()
        assert (await accounts.load("a-1")).state.balance == 5

        async def unreadable(id: str) -> Any:
            raise Unavailable("no reads on purpose")

        async def lost_once(*args: Any, **given: Any) -> Any:
            done = await append(*args, **given)
            if given.get("retry") is None:
                raise OutcomeUnknown("lost", append_id=given["append_id"], partition=0, floor=0, epoch=1)
            monkeypatch.setattr(accounts.journal, "head", unreadable)
            return done

        monkeypatch.setattr(accounts.journal, "append", lost_once)
        with pytest.raises(OutcomeUnknown):
            await accounts.execute("a-2", Deposit(5), command_id="c")
        monkeypatch.undo()
        assert accounts.journal.head == head
        assert (await accounts.execute("a-2", Deposit(5), command_id="c")).repeated


# ---- snapshots


class Counting:
    """Counts the events that a load applies."""

    State = AccountState
    evolved = 0
    events = EVENTS
    initial = staticmethod(Account.initial)
    decide = staticmethod(Account.decide)

    @classmethod
    def evolve(cls, state: AccountState, event: Any) -> AccountState:
        cls.evolved += 1
        return Account.evolve(state, event)


async def test_a_load_starts_from_the_newest_snapshot(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Counting, snapshot_every=10)
        for _ in range(25):
            await accounts.execute("a-1", Deposit(1))
        Counting.evolved = 0
        fresh = book.decider("accounts", Counting, snapshot_every=10)
        assert (await fresh.load("a-1")).state.balance == 25
        assert Counting.evolved == 5
        assert (await fresh.load("a-1", at=13)).state.balance == 13


class OtherState(msgspec.Struct, frozen=True):
    owner: str | None = None
    balance: int = 0
    deposits: int = 0


async def test_a_changed_state_class_replays_instead_of_misreading(tmp_path: Path) -> None:
    class Changed(Counting):
        State = OtherState  # type: ignore[assignment]
        initial = OtherState  # type: ignore[assignment]

        @classmethod
        def evolve(cls, state: Any, event: Any) -> Any:
            return OtherState(None, state.balance + event.amount, state.deposits + 1)

    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Counting, snapshot_every=5)
        for _ in range(12):
            await accounts.execute("a-1", Deposit(2))
        changed = book.decider("accounts", Changed, snapshot_every=5)
        assert (await changed.load("a-1")).state == OtherState(None, 24, 12)
        Counting.evolved = 0
        other_rules = book.decider("accounts", Counting, snapshot_every=5, snapshot_version=2)
        assert (await other_rules.load("a-1")).state.balance == 24
        assert Counting.evolved == 12


class Total:
    """A decider whose state is a number."""

    State = int

    @staticmethod
    def initial() -> int:
        return 0

    @staticmethod
    def decide(command: Deposit, state: int) -> list[Deposited]:
        return [Deposited(command.amount)]

    @staticmethod
    def evolve(state: int, event: Deposited) -> int:
        return state + event.amount


async def test_the_snapshots_of_another_decider_are_ignored(tmp_path: Path) -> None:
    class Count(Total):
        @staticmethod
        def evolve(state: int, event: Deposited) -> int:
            return state + 1

    async with tidebook.open(tmp_path) as book:
        await book.decider("accounts", Total, events=EVENTS, snapshot_every=1).execute("a-1", Deposit(50))
        assert (await book.decider("accounts", Count, events=EVENTS, snapshot_every=9).load("a-1")).state == 1


async def test_a_state_that_could_not_be_decoded_is_not_saved(tmp_path: Path) -> None:
    class Seen:
        State = dict

        @staticmethod
        def initial() -> dict[Any, Any]:
            return {}

        @staticmethod
        def decide(command: Deposit, state: dict[Any, Any]) -> list[Deposited]:
            return [] if command.amount in state else [Deposited(command.amount)]

        @staticmethod
        def evolve(state: dict[Any, Any], event: Deposited) -> dict[Any, Any]:
            return state | {event.amount: True}

    async with tidebook.open(tmp_path) as book:
        await book.decider("accounts", Seen, events=EVENTS, snapshot_every=1).execute("a-1", Deposit(1))
        again = await book.decider("accounts", Seen, events=EVENTS, snapshot_every=1).execute("a-1", Deposit(1))
        assert again.events == []


async def test_a_state_without_a_comparison_is_saved(tmp_path: Path) -> None:
    @dataclass(eq=False)
    class Plain:
        balance: int = 0

        def deposit(self, amount: int) -> Deposited:
            return Deposited(amount)

        def evolve(self, event: Deposited) -> None:
            self.balance += event.amount

    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Plain, events=EVENTS, snapshot_every=1)
        await accounts.execute("a-1", Plain.deposit, 5)
        await book.journal("accounts").delete("a-1", to=1)
        again = book.decider("accounts", Plain, events=EVENTS, snapshot_every=1)
        assert (await again.load("a-1")).state.balance == 5


async def test_a_snapshot_of_an_earlier_incarnation_is_never_loaded(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Account, snapshot_every=2)
        for _ in range(4):
            await accounts.execute("a-1", Deposit(100))
        await book.journal("accounts").purge("a-1")
        fresh = book.decider("accounts", Account, snapshot_every=2)
        for _ in range(5):
            await fresh.execute("a-1", Deposit(1))
        # The state of the purged journal is saved late, by a process that did not see the purge.
        await accounts._save("a-1", msgspec.structs.replace(fresh._cached["a-1"], seq_nr=5, incarnation=(1, 0)))
        assert (await book.decider("accounts", Account, snapshot_every=2).load("a-1")).state.balance == 5


async def test_deleted_events_need_a_snapshot(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Account, snapshot_every=2)
        for _ in range(3):
            await accounts.execute("a-1", Deposit(1))
        await book.journal("accounts").delete("a-1", to=2)
        assert (await book.decider("accounts", Account, snapshot_every=2).load("a-1")).state.balance == 3
        with pytest.raises(Truncated, match="no snapshot"):
            await book.decider("accounts", Account).load("a-1")


def test_snapshots_need_the_type_of_the_state() -> None:
    class NoState:
        @staticmethod
        def initial():  # type: ignore[no-untyped-def]
            return 0

        decide = evolve = staticmethod(lambda a, b: a)

    with tidebook.open_sync(Path("unused")) as book, pytest.raises(InvalidInput, match="State"):
        book.decider("accounts", NoState, events=EVENTS, snapshot_every=5)


# ---- earlier states


async def test_a_state_is_loaded_as_of_a_number_or_a_time(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Account, snapshot_every=2)
        for _ in range(5):
            await accounts.execute("a-1", Deposit(1))
            await asyncio.sleep(0.002)  # log times have a resolution of milliseconds
        assert [(await accounts.load("a-1", at=n)).state.balance for n in (0, 1, 2, 3, 5, 99)] == [0, 1, 2, 3, 5, 5]
        times = [event.timestamp async for event in book.journal("accounts").read("a-1")]
        found = [(await accounts.load("a-1", at=each)).state.balance for each in times]
        assert found == [1, 2, 3, 4, 5]
        assert (await accounts.load("a-1", at=times[0] - timedelta(seconds=1))).state.balance == 0
        assert (await accounts.load("a-1", at=datetime.now(UTC))).seq_nr == 5


# ---- command ids


async def test_a_repeated_command_returns_the_same_result(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Account, snapshot_every=7)
        first = await accounts.execute("a-1", Deposit(5), command_id="c-1")
        for n in range(50):  # more appends than the fold remembers
            await accounts.execute("a-1", Deposit(1), command_id=f"d-{n}")
        fresh = book.decider("accounts", Account, snapshot_every=7)
        for decider in (accounts, fresh):
            again = await decider.execute("a-1", Deposit(5), command_id="c-1")
            assert again.repeated
            assert (again.state, again.events, again.first, again.last) == (
                first.state, first.events, first.first, first.last,
            )  # fmt: skip
            assert (await decider.load("a-1")).state.balance == 55
        other = await accounts.execute("a-2", Deposit(5), command_id="c-1")
        assert not other.repeated


async def test_a_command_that_two_processes_execute_concurrently_takes_effect_once(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as one, tidebook.open(tmp_path) as two:
        deciders = [book.decider("accounts", Account) for book in (one, two)]
        for n in range(10):
            both = await asyncio.gather(*(each.execute("a-1", Deposit(1), command_id=f"c-{n}") for each in deciders))
            assert {done.first for done in both} == {n + 1}
            assert {done.state.balance for done in both} == {n + 1}


# ---- forms


async def test_the_class_form_behaves_like_the_functions(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", MethodAccount, snapshot_every=2)
        first = await accounts.execute("a-1", MethodAccount.deposit, 5)
        done = await accounts.execute("a-1", MethodAccount.withdraw, 3)
        assert (first.state.history, done.state.history) == ([5], [5, -3])
        with pytest.raises(Refused):
            await accounts.execute("a-1", MethodAccount.withdraw, 3)
        assert (await book.decider("accounts", MethodAccount, snapshot_every=2).load("a-1")).state == done.state


async def test_events_may_carry_tags(tmp_path: Path) -> None:
    class Tagging(Account):
        events = EVENTS

        @staticmethod
        def decide(command: Any, state: AccountState) -> Any:
            return [Event(Deposited(command.amount), tags={"money"}, metadata={"by": "x"})]

    async with tidebook.open(tmp_path) as book:
        done = await book.decider("accounts", Tagging).execute("a-1", Deposit(1), command_id="c")
        assert done.events == [Deposited(1)]
        [event] = [event async for event in book.journal("accounts").read("a-1")]
        assert (event.tags, event.metadata) == (frozenset({"money"}), {"by": "x", "command_id": "c"})


@pytest.mark.parametrize("bad", [object(), 5, type("Empty", (), {})], ids=lambda bad: type(bad).__name__)
def test_an_object_that_is_not_a_decider_is_refused(bad: Any) -> None:
    with tidebook.open_sync(Path("unused")) as book, pytest.raises(InvalidInput, match="not a decider"):
        book.decider("accounts", bad, events=EVENTS)


def test_a_blocking_decider_executes_commands(tmp_path: Path) -> None:
    with tidebook.open_sync(tmp_path) as book:
        accounts = book.decider("accounts", Account)
        assert accounts.execute("a-1", Deposit(5)).state.balance == 5
        assert accounts.load("a-1").seq_nr == 1


# ---- scenarios


def test_a_scenario_checks_events_state_and_refusals() -> None:
    scenario(Account).given([Opened("ada"), Deposited(50)]).when(Withdraw(30)).then([Withdrawn(30)]).then_state(
        AccountState("ada", 20)
    )
    scenario(Account).given([Deposited(5)]).when(Withdraw(6)).refused(Refused, "balance is 5")
    scenario(MethodAccount).given([Deposited(5)]).when(MethodAccount.withdraw, 5).then([Withdrawn(5)])


def test_a_scenario_fails_on_unexpected_events_states_and_refusals() -> None:
    given = scenario(Account).given([Deposited(5)])
    with pytest.raises(AssertionError, match="produced"):
        given.when(Deposit(1)).then([Deposited(2)])
    with pytest.raises(AssertionError, match="was refused"):
        given.when(Withdraw(99)).then([])
    with pytest.raises(AssertionError, match="was accepted"):
        given.when(Deposit(1)).refused()
    with pytest.raises(AssertionError, match="call when"):
        scenario(Account).then([])


async def test_events_that_evolve_refuses_are_not_appended(tmp_path: Path) -> None:
    class Superstitious(Total):
        @staticmethod
        def evolve(state: int, event: Deposited) -> int:
            if event.amount == 13:
                raise KeyError("no 13")
            return state + event.amount

    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Superstitious, events=EVENTS)
        for _ in range(2):  # first on a state that is not cached, then on a cached one
            with pytest.raises(KeyError, match="no 13"):
                await accounts.execute("a-1", Deposit(13))
            await accounts.execute("a-1", Deposit(1))
        assert (await book.decider("accounts", Superstitious, events=EVENTS).load("a-1")).state == 2


async def test_a_caller_that_changes_a_returned_state_does_not_change_the_cached_one(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", MethodAccount, snapshot_every=2)
        (await accounts.execute("a-1", MethodAccount.deposit, 5)).state.history.append(1000)
        (await accounts.load("a-1")).state.balance = 1000
        done = await accounts.execute("a-1", MethodAccount.deposit, 5)
        assert done.state == MethodAccount(10, [5, 5])
        fresh = book.decider("accounts", MethodAccount, snapshot_every=2)
        assert (await fresh.load("a-1")).state == MethodAccount(10, [5, 5])


async def test_a_function_that_changes_the_state_in_place_affects_only_appended_events(tmp_path: Path) -> None:
    class Changing:
        State = list[int]

        @staticmethod
        def initial() -> list[int]:
            return []

        @staticmethod
        def decide(command: Deposit, state: list[int]) -> list[Deposited]:
            return [Deposited(command.amount)]

        @staticmethod
        def evolve(state: list[int], event: Deposited) -> list[int]:
            state.append(event.amount)
            return state

    async with tidebook.open(tmp_path) as one, tidebook.open(tmp_path) as two:
        first, second = (book.decider("accounts", Changing, events=EVENTS) for book in (one, two))
        await first.execute("a-1", Deposit(1))
        await second.execute("a-1", Deposit(2))
        assert (await first.execute("a-1", Deposit(3))).state == [1, 2, 3]  # after a conflict


async def test_a_command_of_a_purged_journal_does_not_get_another_commands_result(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Account, events=EVENTS)
        await accounts.execute("a-1", Deposit(5), command_id="c1")
        await book.journal("accounts").purge("a-1")
        fresh = book.decider("accounts", Account, events=EVENTS)
        for decider in (accounts, fresh):
            gone = await decider.execute("a-1", Deposit(5), command_id="c1")
            assert (gone.repeated, gone.events, gone.first, gone.seq_nr) == (True, [], None, 0)
        await fresh.execute("a-1", Deposit(777), command_id="other")
        for decider in (accounts, fresh):
            gone = await decider.execute("a-1", Deposit(5), command_id="c1")
            assert (gone.repeated, gone.events, gone.first, gone.seq_nr) == (True, [], None, 1)
            assert gone.state.balance == 777


async def test_a_repeated_command_whose_events_are_deleted_returns_the_current_state(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Account, events=EVENTS, snapshot_every=4)
        for n in range(4):
            await accounts.execute("a-1", Deposit(1), command_id=f"c{n}")
        await book.journal("accounts").delete("a-1", to=2)
        left = await accounts.execute("a-1", Deposit(1), command_id="c2")
        assert (left.repeated, left.events, left.first, left.last) == (True, [Deposited(1)], 3, 3)
        assert (left.state.balance, left.seq_nr) == (4, 4)
        await book.journal("accounts").delete("a-1", to=4)
        gone = await accounts.execute("a-1", Deposit(1), command_id="c1")
        assert (gone.repeated, gone.events, gone.first, gone.seq_nr, gone.state.balance) == (True, [], None, 4, 4)


async def test_a_repeated_command_needs_no_snapshot_while_its_entity_is_cached(tmp_path: Path) -> None:
    async with tidebook.open(tmp_path) as book:
        accounts = book.decider("accounts", Account, events=EVENTS)
        for n in range(2):
            await accounts.execute("a-1", Deposit(1), command_id=f"c{n}")
        await book.journal("accounts").delete("a-1", to=2)
        gone = await accounts.execute("a-1", Deposit(1), command_id="c0")
        assert (gone.repeated, gone.state.balance) == (True, 2)


async def test_a_single_event_may_be_iterable(tmp_path: Path) -> None:
    class Paid(pydantic.BaseModel):
        amount: int

    class Payments:
        @staticmethod
        def initial() -> int:
            return 0

        @staticmethod
        def decide(command: Deposit, state: int) -> Paid:
            return Paid(amount=command.amount)

        @staticmethod
        def evolve(state: int, event: Any) -> int:
            return state + int(event.amount)

    async with tidebook.open(tmp_path) as book:
        done = await book.decider("payments", Payments, events=[Paid]).execute("p-1", Deposit(5))
        assert (done.state, done.events) == (5, [Paid(amount=5)])
