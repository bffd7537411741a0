"""Orders as deciders: a command returns events, which are appended to the journal of the order."""

from __future__ import annotations

from enum import StrEnum

import msgspec

import tidebook
from tidebook import Event

#: The tag of payments; a feed puts each into the queue of mails.
PAID_TAG = "paid"


@tidebook.event_type("shop.placed")
class Placed(msgspec.Struct, frozen=True):
    """A customer has ordered an article."""

    article: str
    price: int


@tidebook.event_type("shop.paid")
class Paid(msgspec.Struct, frozen=True):
    """The order was paid."""

    price: int


@tidebook.event_type("shop.cancelled")
class Cancelled(msgspec.Struct, frozen=True):
    """The customer cancelled the order."""


class Refused(Exception):
    """A command that the order does not allow."""


class Stage(StrEnum):
    """The state of an order."""

    NEW = "new"
    PLACED = "placed"
    PAID = "paid"
    CANCELLED = "cancelled"


class Order(msgspec.Struct):
    """The state of an order: its commands return events, and `evolve` applies them."""

    stage: Stage = Stage.NEW
    price: int = 0

    def place(self, article: str, price: int) -> Placed:
        """Order an article, once."""
        self._require(Stage.NEW)
        return Placed(article, price)

    def pay(self) -> Event:
        """Pay for the order; the event is tagged, so that others can follow all payments."""
        self._require(Stage.PLACED)
        return Event(Paid(self.price), tags={PAID_TAG})

    def cancel(self) -> Cancelled:
        """Cancel the order, unless it is paid."""
        self._require(Stage.PLACED)
        return Cancelled()

    def evolve(self, event: Placed | Paid | Cancelled) -> None:
        """Apply an event."""
        match event:
            case Placed():
                self.stage, self.price = Stage.PLACED, event.price
            case Paid():
                self.stage = Stage.PAID
            case Cancelled():
                self.stage = Stage.CANCELLED

    def _require(self, stage: Stage) -> None:
        if self.stage is not stage:
            raise Refused(f"the order is {self.stage}, not {stage}")
