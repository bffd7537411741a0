"""A small domain for the tests: accounts with deposits and withdrawals."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

import tidebook


@tidebook.event_type("opened")
class Opened(msgspec.Struct, frozen=True):
    owner: str


@tidebook.event_type("deposited")
class Deposited(msgspec.Struct, frozen=True):
    amount: int


@tidebook.event_type("withdrawn")
class Withdrawn(msgspec.Struct, frozen=True):
    amount: int


class Open(msgspec.Struct, frozen=True):
    owner: str


class Deposit(msgspec.Struct, frozen=True):
    amount: int


class Withdraw(msgspec.Struct, frozen=True):
    amount: int


class AccountState(msgspec.Struct, frozen=True):
    owner: str | None = None
    balance: int = 0


class Refused(Exception):
    """The account does not allow the operation."""


EVENTS = [Opened, Deposited, Withdrawn]


class Account:
    """The decider as three functions."""

    State = AccountState

    @staticmethod
    def initial() -> AccountState:
        return AccountState()

    @staticmethod
    def decide(command: Open | Deposit | Withdraw, state: AccountState) -> list[Opened | Deposited | Withdrawn]:
        match command:
            case Open():
                return [] if state.owner is not None else [Opened(command.owner)]
            case Deposit():
                return [Deposited(command.amount)]
            case Withdraw():
                if command.amount > state.balance:
                    raise Refused(f"the balance is {state.balance}")
                return [Withdrawn(command.amount)]

    @staticmethod
    def evolve(state: AccountState, event: Opened | Deposited | Withdrawn) -> AccountState:
        match event:
            case Opened():
                return AccountState(event.owner, state.balance)
            case Deposited():
                return AccountState(state.owner, state.balance + event.amount)
            case Withdrawn():
                return AccountState(state.owner, state.balance - event.amount)


@dataclass
class MethodAccount:
    """The decider in the class form, in which the object is the state."""

    balance: int = 0
    history: list[int] = field(default_factory=list)

    def deposit(self, amount: int) -> Deposited:
        return Deposited(amount)

    def withdraw(self, amount: int) -> list[Withdrawn]:
        if amount > self.balance:
            raise Refused(f"the balance is {self.balance}")
        return [Withdrawn(amount)]

    def evolve(self, event: Deposited | Withdrawn) -> None:
        change = event.amount if isinstance(event, Deposited) else -event.amount
        self.balance += change
        self.history.append(change)
