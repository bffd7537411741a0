"""The bank over HTTP, and its decider without a book."""

from pathlib import Path

import httpx
import pytest

from examples.bank.bank import Account, Deposited, Withdrawn, app
from tidebook.testing import scenario


async def test_money_goes_in_and_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://bank") as client:
        async with app.router.lifespan_context(app):
            assert (await client.get("/balances")).json() == {}
            for _ in range(2):  # a request that is repeated takes effect once
                assert (await client.post("/ada/deposit?amount=50&request=1")).json() == 50
            assert (await client.post("/ada/withdraw?amount=51&request=2")).status_code == 409
            assert (await client.post("/ada/withdraw?amount=30&request=3")).json() == 20
        async with app.router.lifespan_context(app):
            assert (await client.get("/balances")).json() == {"ada": 20}


def test_the_balance_may_be_withdrawn_and_no_more() -> None:
    scenario(Account).given([Deposited(20)]).when(Account.withdraw, 20).then([Withdrawn(20)])
    scenario(Account).given([Deposited(20)]).when(Account.withdraw, 21).refused(ValueError, "balance is 20")
