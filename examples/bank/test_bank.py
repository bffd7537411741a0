"""The bank over HTTP, and its decider without a book."""

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from examples.bank.bank import Account, Deposited, Refused, Withdrawn, make_app
from tidebook.domain.scenario import scenario


def test_money_goes_in_and_out(tmp_path: Path) -> None:
    app = make_app(str(tmp_path / "book"), f"sqlite+aiosqlite:///{tmp_path / 'bank.db'}")
    with TestClient(app) as client:
        assert client.post("/accounts/ada/deposit?amount=50&request_id=r-1").json() == 50
        assert client.post("/accounts/ada/deposit?amount=50&request_id=r-1").json() == 50
        assert client.post("/accounts/ada/withdraw?amount=30").json() == 20
        assert client.post("/accounts/bob/deposit?amount=7").json() == 7
        assert client.get("/balances").json() == {"ada": 20, "bob": 7}
        assert client.post("/accounts/bob/withdraw?amount=8").status_code == 409
    with TestClient(make_app(str(tmp_path / "book"), f"sqlite+aiosqlite:///{tmp_path / 'bank.db'}")) as client:
        assert client.get("/balances").json() == {"ada": 20, "bob": 7}


@pytest.mark.parametrize("amount", [1, 20])
def test_the_balance_may_be_withdrawn(amount: int) -> None:
    scenario(Account).given([Deposited(20)]).when(Account.withdraw, amount).then([Withdrawn(amount)])


def test_more_than_the_balance_is_refused() -> None:
    scenario(Account).given([Deposited(20)]).when(Account.withdraw, 21).refused(Refused, "balance is 20")
