"""The bank over HTTP, and its decider without a book."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from examples.bank.bank import Account, Deposited, Refused, Withdrawn, make_app
from tidebook.testing import scenario


@asynccontextmanager
async def bank(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = make_app(str(folder / "book"), f"sqlite+aiosqlite:///{folder / 'bank.db'}")
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://bank") as client,
    ):
        yield client


async def test_money_goes_in_and_out(tmp_path: Path) -> None:
    async with bank(tmp_path) as client:
        for _ in range(2):  # a request that is repeated takes effect once
            assert (await client.post("/accounts/ada/deposit?amount=50&request_id=r-1")).json() == 50
        assert (await client.post("/accounts/ada/withdraw?amount=30")).json() == 20
        assert (await client.post("/accounts/bob/deposit?amount=7")).json() == 7
        assert (await client.get("/balances")).json() == {"ada": 20, "bob": 7}
        assert (await client.post("/accounts/bob/withdraw?amount=8")).status_code == 409
    async with bank(tmp_path) as client:
        assert (await client.get("/balances")).json() == {"ada": 20, "bob": 7}


@pytest.mark.parametrize("amount", [1, 20])
def test_the_balance_may_be_withdrawn(amount: int) -> None:
    scenario(Account).given([Deposited(20)]).when(Account.withdraw, amount).then([Withdrawn(amount)])


def test_more_than_the_balance_is_refused() -> None:
    scenario(Account).given([Deposited(20)]).when(Account.withdraw, 21).refused(Refused, "balance is 20")
