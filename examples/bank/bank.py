"""A bank in FastAPI: accounts that are paid into and out of, and a table of balances."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import msgspec
from fastapi import FastAPI, HTTPException
from pydantic import PositiveInt
from sqlalchemy import Column, Integer, MetaData, String, Table, create_engine, select

import tidebook


@tidebook.event_type("deposited")
class Deposited(msgspec.Struct, frozen=True):
    amount: int


@tidebook.event_type("withdrawn")
class Withdrawn(msgspec.Struct, frozen=True):
    amount: int


class Account(msgspec.Struct):
    balance: int = 0

    def deposit(self, amount: int) -> Deposited:
        return Deposited(amount)

    def withdraw(self, amount: int) -> Withdrawn:
        if amount > self.balance:
            raise ValueError(f"the balance is {self.balance}")
        return Withdrawn(amount)

    def evolve(self, event: Deposited | Withdrawn) -> None:
        self.balance += event.amount if isinstance(event, Deposited) else -event.amount


balances = Table("balances", MetaData(), Column("id", String(100), primary_key=True), Column("balance", Integer))


def apply(tx: Any, event: tidebook.TypedEvent[Deposited | Withdrawn]) -> None:
    table = tx.table(balances)
    change = event.data.amount if isinstance(event.data, Deposited) else -event.data.amount
    if not tx.execute(table.update().where(table.c.id == event.id).values(balance=table.c.balance + change)).rowcount:
        tx.execute(table.insert().values(id=event.id, balance=change))


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with tidebook.open("./bank-data", replicate=True) as book:
        app.state.engine = create_engine("sqlite:///bank.db")
        app.state.accounts = book.decider("accounts", Account, snapshot_every=100)
        app.state.balances = book.projection("balances", topics=["accounts"], into=app.state.engine, tables=[balances])
        await app.state.balances.start()  # creates the table: a request may read it at once
        async with book.running(app.state.balances(apply)):
            yield
        app.state.engine.dispose()


app = FastAPI(lifespan=lifespan)


@app.post("/{id}/{command}")
async def execute(id: str, command: Literal["deposit", "withdraw"], amount: PositiveInt, request: str) -> int:
    try:
        done = await app.state.accounts.execute(id, getattr(Account, command), amount, command_id=request)
    except ValueError as error:
        raise HTTPException(409, str(error)) from error
    await app.state.balances.wait_for(done)
    return int(done.state.balance)


@app.get("/balances")
def list_balances() -> dict[str, int]:
    with app.state.engine.connect() as connection:
        return {row.id: row.balance for row in connection.execute(select(balances))}
