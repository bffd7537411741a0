"""Deciders, and a process manager that repeats each of their events on a second entity and in a queue."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from faults.plan import ACCOUNTS, CAUSED, MIRROR
from faults.roles.context import WITHOUT_EFFECT, Context
from tidebook.core.errors import Conflict, OutcomeUnknown

TASKS = 2
RETRIES_MAX = 4
PAUSE_S = 0.6
#: The probability that a command is sent again although its result is known, as by a client whose response was lost.
REPEATED = 0.1


class Deposited(msgspec.Struct, frozen=True):
    """A deposit. Its value identifies the event in histories."""

    value: str
    amount: int


class Withdrawn(msgspec.Struct, frozen=True):
    """A withdrawal."""

    value: str
    amount: int


class Refused(Exception):
    """The balance is too low."""

    def __init__(self, found: int) -> None:
        super().__init__(f"the balance is {found}")
        self.found = found


class Account:
    """An account, whose state is its balance; a command is the event that it requests."""

    State = int
    events = (Deposited, Withdrawn)

    @staticmethod
    def initial() -> int:
        """Return the balance without events."""
        return 0

    @staticmethod
    def decide(command: Deposited | Withdrawn, state: int) -> list[Deposited | Withdrawn]:
        """Refuse a withdrawal that the balance does not cover."""
        if isinstance(command, Withdrawn) and command.amount > state:
            raise Refused(state)
        return [command]

    @staticmethod
    def evolve(state: int, event: Deposited | Withdrawn) -> int:
        """Return the balance after an event."""
        return state + event.amount if isinstance(event, Deposited) else state - event.amount


def accounts_of(book: Any) -> Any:
    """Return the decider of accounts of a book."""
    return book.decider(ACCOUNTS, Account, snapshot_every=10)


async def decide(context: Context) -> None:
    """Execute commands on accounts, in several tasks, until stopped."""
    async with context.open_book() as book:
        accounts = accounts_of(book)
        async with asyncio.TaskGroup() as group:
            for _ in range(TASKS):
                group.create_task(_work(context, accounts))


async def _work(context: Context, accounts: Any) -> None:
    while not context.stopping.is_set():
        id = context.plan.account(context.chance.random())
        if context.chance.random() < 0.2:
            await balance(context, accounts, id)
        else:
            await _execute(context, accounts, id)
        await context.rest(PAUSE_S)


async def balance(context: Context, accounts: Any, id: str) -> None:
    """Load the state of an account and record it."""
    await context.record("balance", lambda: accounts.load(id), _state, key=f"{ACCOUNTS}/{id}")


def _state(found: Any) -> dict[str, int]:
    return {"state": found.state, "seq_nr": found.seq_nr}


async def _execute(context: Context, accounts: Any, id: str) -> None:
    value, amount = context.value(), context.chance.randrange(1, 10)
    command = (Deposited if context.chance.random() < 0.6 else Withdrawn)(value, amount)
    for _ in range(RETRIES_MAX):
        found = await context.record(
            "execute",
            lambda: accounts.execute(id, command, command_id=value),
            _state,
            failures=(*WITHOUT_EFFECT, Conflict, Refused),
            key=f"{ACCOUNTS}/{id}",
            command_id=value,
            command="deposit" if isinstance(command, Deposited) else "withdraw",
            amount=amount,
            value=value,
        )
        if context.stopping.is_set():
            return
        if isinstance(found, OutcomeUnknown):
            await context.pause()
        elif context.chance.random() >= REPEATED:
            return


def mirror(book: Any, engine: Any) -> Any:
    """Return a process manager: each event becomes a deposit on the account's mirror, and an entry of a queue."""
    accounts = accounts_of(book)
    process = book.process("mirror", topics=[ACCOUNTS], into=engine)

    @process  # type: ignore[untyped-decorator]
    def cause(effects: Any, event: Any) -> None:
        if event.id.startswith(MIRROR):
            return
        effects.execute(accounts, f"{MIRROR}{event.id}", Deposited(f"{MIRROR}{event.data.value}", event.data.amount))
        effects.put(CAUSED, event.data.value)

    return process


async def caused_commands(book: Any) -> list[dict[str, str]]:
    """Return the commands of the process manager: source and event, in the order of each mirror."""
    found = []
    journal = book.journal(ACCOUNTS)
    async for id in journal.ids():
        if id.startswith(MIRROR):
            async for event in journal.read(id):
                source, value = id.removeprefix(MIRROR), event.payload["value"].removeprefix(MIRROR)
                found.append({"key": f"{ACCOUNTS}/{source}", "value": value})
    return found
