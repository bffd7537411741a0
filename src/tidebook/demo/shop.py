"""The shop: customers order and pay, emails are sent, sales are counted, messages are relayed, in one process."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from sqlalchemy import Engine, create_engine

import tidebook
from tidebook.demo.measurements import MAILS, ORDER_SECONDS, Measurements
from tidebook.demo.order_table import insert_order, order_rows
from tidebook.demo.orders import PAID_TAG, Order
from tidebook.demo.sales import apply, sales
from tidebook.queue import Job

ARTICLES = {"lamp": 40, "chair": 120, "table": 300, "shelf": 90}
QUEUE = "shop-mails"
#: The pause between two customers.
CUSTOMER_EVERY_S = 0.5
#: The share of orders that are paid; the others are cancelled.
PAID_SHARE = 0.8


class Shop:
    """The parts of the shop, which share one book."""

    def __init__(self, book: tidebook.Book, database: Engine, read_model: Engine, measurements: Measurements) -> None:
        self._database = database
        self._measurements = measurements
        self._random = random.Random(0)
        self.orders = book.decider("shop-orders", Order, snapshot_every=100)
        self.sales = book.projection("shop-sales", topics=["shop-orders"], into=read_model, tables=[sales])(apply)
        self.feed = book.feed(PAID_TAG, QUEUE, topics=["shop-orders"])
        self.mails = book.worker(QUEUE, self.send_mail)
        self.relay = book.relay()

    async def serve_customers(self) -> None:
        """Serve one customer after another, for as long as the shop is open."""
        while True:
            await self.serve_customer(f"order-{time.time_ns() // 1_000_000}")
            await asyncio.sleep(CUSTOMER_EVERY_S)

    async def serve_customer(self, id: str) -> None:
        """Take an order, and let the customer pay or cancel it."""
        began_s = time.monotonic()
        article, price = self._random.choice([*ARTICLES.items()])
        await asyncio.to_thread(insert_order, self._database, id, article, price)
        await self.orders.execute(id, Order.place, article, price)
        await self.orders.execute(id, Order.pay if self._random.random() < PAID_SHARE else Order.cancel)
        await self._measurements.write(ORDER_SECONDS, order=id, seconds=round(time.monotonic() - began_s, 4))

    async def send_mail(self, job: Job) -> None:
        """Send the email for a paid order; this demo only records that it was sent."""
        await self._measurements.write(MAILS, order=job.data["id"])

    def parts(self) -> list[object]:
        """Return the parts that run while the shop is open."""
        return [
            self.serve_customers, self.feed, self.mails, self.sales, self.relay, self._measurements.flush_periodically,
        ]  # fmt: skip


@asynccontextmanager
async def open_shop(book: tidebook.Book) -> AsyncIterator[Shop]:
    """Open the shop on an embedded book; everything that it writes is in the book's folder."""
    folder = Path(book.settings.folder).resolve()
    database = create_engine(book.outbox.url)
    read_model = create_engine(f"sqlite:///{folder / 'sales.db'}")
    try:
        order_rows.create(database, checkfirst=True)
        async with aclosing(Measurements(book, folder)) as measurements:
            yield Shop(book, database, read_model, measurements)
    finally:
        database.dispose()
        read_model.dispose()


@asynccontextmanager
async def shop(book: tidebook.Book) -> AsyncIterator[list[object]]:
    """Yield the parts to run, as `tidebook run tidebook.demo:shop` expects them."""
    async with open_shop(book) as opened:
        yield opened.parts()
