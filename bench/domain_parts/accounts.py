"""The domain that the parts measure: accounts that accept deposits."""

from __future__ import annotations

import msgspec

import tidebook


@tidebook.event_type("deposited")
class Deposited(msgspec.Struct, frozen=True):
    """A deposit was made."""

    amount: int


class Deposit(msgspec.Struct, frozen=True):
    """Deposit an amount."""

    amount: int


class Account:
    """The decider of an account; its state is the balance."""

    State = int

    @staticmethod
    def initial() -> int:
        """Return the balance of a new account."""
        return 0

    @staticmethod
    def decide(command: Deposit, state: int) -> list[Deposited]:
        """Accept every deposit."""
        return [Deposited(command.amount)]

    @staticmethod
    def evolve(state: int, event: Deposited) -> int:
        """Add the amount."""
        return state + event.amount
