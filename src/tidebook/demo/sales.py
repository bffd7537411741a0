"""A projection: a table with the article and the payment of each order, kept up to date from the orders' events."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, select

import tidebook
from tidebook.demo.orders import Cancelled, Paid, Placed

sales = Table(
    "sales",
    MetaData(),
    Column("id", String(100), primary_key=True),
    Column("article", String(100), nullable=False),
    Column("paid", Integer, nullable=False),
)


def apply(tx: Any, event: tidebook.TypedEvent[Placed | Paid | Cancelled]) -> None:
    """Apply one event; the projection's offset is stored in the same transaction."""
    table = tx.table(sales)
    match event.data:
        case Placed():
            tx.execute(table.insert().values(id=event.id, article=event.data.article, paid=0))
        case Paid():
            tx.execute(table.update().where(table.c.id == event.id).values(paid=event.data.price))
        case Cancelled():
            tx.execute(table.delete().where(table.c.id == event.id))


def revenue(engine: Engine) -> dict[str, int]:
    """Return the revenue of each article."""
    totals: dict[str, int] = {}
    with engine.connect() as connection:
        for article, paid in connection.execute(select(sales.c.article, sales.c.paid)):
            totals[article] = totals.get(article, 0) + paid
    return totals
