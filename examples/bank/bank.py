"""A bank in FastAPI: accounts that are opened, paid into and paid out of, and a table of balances."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from fastapi import FastAPI, HTTPException
from sqlalchemy import Column, Integer, MetaData, String, Table, select
from sqlalchemy.ext.asyncio import create_async_engine

import tidebook


@tidebook.event_type("deposited")
class Deposited(msgspec.Struct, frozen=True):
    amount: int


@tidebook.event_type("withdrawn")
class Withdrawn(msgspec.Struct, frozen=True):
    amount: int


class Refused(Exception): ...


class Account(msgspec.Struct):
    balance: int = 0

    def deposit(self, amount: int) -> Deposited:
        return Deposited(amount)

    def withdraw(self, amount: int) -> Withdrawn:
        if amount > self.balance:
            raise Refused(f"the balance is {self.balance}")
        return Withdrawn(amount)

    def evolve(self, event: Deposited | Withdrawn) -> None:
        self.balance += event.amount if isinstance(event, Deposited) else -event.amount


balances = Table("balances", MetaData(), Column("id", String(100), primary_key=True), Column("balance", Integer))


class Bank:
    def __init__(self, book: tidebook.Book, database: str) -> None:
        self.engine = create_async_engine(database)
        self.accounts = book.decider("accounts", Account, snapshot_every=100)
        self.balances = book.projection("balances", topics=["accounts"], into=self.engine, tables=[balances])
        self.balances(self.apply)

    async def apply(self, tx: Any, event: tidebook.TypedEvent[Deposited | Withdrawn]) -> None:
        table = tx.table(balances)
        change = event.data.amount if isinstance(event.data, Deposited) else -event.data.amount
        done = await tx.execute(table.update().where(table.c.id == event.id).values(balance=table.c.balance + change))
        if not done.rowcount:
            await tx.execute(table.insert().values(id=event.id, balance=change))


def make_app(folder: str = "./bank-data", database: str = "sqlite+aiosqlite:///bank.db") -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with tidebook.open(folder, replicate=True) as book:
            bank = app.state.bank = Bank(book, database)
            async with book.running(bank.balances):
                yield
            await bank.engine.dispose()

    app = FastAPI(lifespan=lifespan)

    @app.post("/accounts/{id}/{command}")
    async def execute(id: str, command: str, amount: int, request_id: str | None = None) -> int:
        bank: Bank = app.state.bank
        commands = {"deposit": Account.deposit, "withdraw": Account.withdraw}
        try:
            done = await bank.accounts.execute(id, commands[command], amount, command_id=request_id)
        except (KeyError, Refused) as error:
            raise HTTPException(409, str(error)) from error
        await bank.balances.wait_for(done)
        return int(done.state.balance)

    @app.get("/balances")
    async def list_balances() -> dict[str, int]:
        bank: Bank = app.state.bank
        async with bank.engine.connect() as connection:
            return {row.id: row.balance for row in await connection.execute(select(balances).order_by(balances.c.id))}

    return app
