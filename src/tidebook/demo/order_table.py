"""An outbox: a row of the shop's SQL table and the message about it are written in one transaction."""

from __future__ import annotations

import json

from sqlalchemy import Column, Engine, Integer, MetaData, String, Table

from tidebook import outbox

#: The topic of the messages, in the log of the book.
TOPIC = "shop-messages"

order_rows = Table(
    "shop_orders",
    MetaData(),
    Column("id", String(100), primary_key=True),
    Column("article", String(100), nullable=False),
    Column("price", Integer, nullable=False),
)


def insert_order(engine: Engine, id: str, article: str, price: int) -> None:
    """Insert a row and publish a message: both are committed, or neither."""
    with engine.begin() as connection:
        connection.execute(order_rows.insert().values(id=id, article=article, price=price))
        payload = json.dumps({"id": id, "article": article, "price": price}).encode()
        outbox.publish(connection, topic=TOPIC, key=id, payload=payload)
