"""Violations planted in histories of deciders and process managers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.testing.histories.test_planted_violations import Script

COMMANDS = "commands of deciders take effect once, in one order"
CAUSED = "process managers cause each effect exactly once"
KEY = "accounts/a1"


class Accounts(Script):
    """Commands on one account, one after the other."""

    def deposit(self, value: str, amount: int, *, state: int = 0, seq_nr: int = 0, **more: Any) -> Accounts:
        return self._execute("deposit", value, amount, {"state": state, "seq_nr": seq_nr}, **more)

    def withdraw(self, value: str, amount: int, *, state: int = 0, seq_nr: int = 0, **more: Any) -> Accounts:
        return self._execute("withdraw", value, amount, {"state": state, "seq_nr": seq_nr}, **more)

    def overdrawn(self, value: str, amount: int, found: int) -> Accounts:
        return self._execute("withdraw", value, amount, {"found": found}, error="Refused")

    def _execute(self, command: str, value: str, amount: int, result: Any, **more: Any) -> Accounts:
        args: dict[str, Any] = {"key": KEY, "command_id": value, "command": command, "amount": amount, "value": value}
        self("execute", None if more.get("unknown") else result, **args, **more)
        return self

    def balance(self, state: int, seq_nr: int) -> Accounts:
        self("balance", {"state": state, "seq_nr": seq_nr}, key=KEY)
        return self

    def logged(self, *values: str) -> Accounts:
        rows: list[dict[str, Any]] = [
            {
                "kind": "append", "key": KEY, "offset": offset, "epoch": 1, "epoch_of_log": 1, "values": [value],
                "tags": [[]], "append_id": f"{offset}", "expected": None, "at": None,
            }
            for offset, value in enumerate(values)
        ]  # fmt: skip
        self("dump_log", rows, topic="accounts", partition=0)
        return self

    def caused(self, *values: str, effect: str = "command") -> Accounts:
        rows = [{"key": KEY, "value": value} for value in values]
        self("dump_caused", rows, process="mirror", effect=effect)
        return self


def made() -> Accounts:
    return Accounts()


@pytest.mark.parametrize(
    ("history", "rules"),
    [
        (made().deposit("a", 5, state=5, seq_nr=1).withdraw("b", 2, state=3, seq_nr=2).balance(3, 2), set()),
        # decided on a stale state, or applied wrongly
        (made().deposit("a", 5, state=5, seq_nr=1).deposit("b", 2, state=2, seq_nr=2), {COMMANDS}),
        (made().deposit("a", 5, state=5, seq_nr=1).deposit("b", 2, state=7, seq_nr=3), {COMMANDS}),
        (made().deposit("a", 5, state=5, seq_nr=1).withdraw("b", 6, state=-1, seq_nr=2), {COMMANDS}),
        (made().deposit("a", 5, state=5, seq_nr=1).balance(0, 0), {COMMANDS}),
        # refused by the state of that moment
        (made().deposit("a", 5, state=5, seq_nr=1).overdrawn("b", 6, 5), set()),
        (made().deposit("a", 5, state=5, seq_nr=1).overdrawn("b", 6, 0), {COMMANDS}),
        (made().deposit("a", 5, state=5, seq_nr=1).overdrawn("b", 5, 5), {COMMANDS}),
        # unknown outcomes and retries: once, with the first result
        (made().deposit("a", 5, unknown=True).balance(0, 0).balance(5, 1), set()),
        (made().deposit("a", 5, unknown=True).balance(5, 1).balance(0, 0), {COMMANDS}),
        (made().deposit("a", 5, unknown=True).deposit("a", 5, state=5, seq_nr=1).balance(5, 1), set()),
        (made().deposit("a", 5, unknown=True).deposit("a", 5, state=10, seq_nr=2), {COMMANDS}),
        (made().deposit("a", 5, state=5, seq_nr=1).deposit("a", 5, state=10, seq_nr=2), {COMMANDS}),
        # by the log
        (made().deposit("a", 5, state=5, seq_nr=1).logged("a"), set()),
        (made().deposit("a", 5, state=5, seq_nr=1).logged(), {COMMANDS}),
        (made().deposit("a", 5, state=5, seq_nr=1).logged("a", "a"), {COMMANDS}),
        (made().overdrawn("a", 5, 0).logged("a"), {COMMANDS}),
        (made().deposit("a", 5, unknown=True).deposit("b", 1, state=1, seq_nr=1).logged("b"), set()),
        (made().deposit("a", 5, unknown=True).deposit("b", 1, state=6, seq_nr=2).logged("a", "b"), set()),
        (made().deposit("a", 5, unknown=True).deposit("b", 1, state=6, seq_nr=2).logged("b", "a"), {COMMANDS}),
    ],
)
def test_planted_in_commands(history: Script, rules: set[str]) -> None:
    assert history.broken() == rules


def two() -> Accounts:
    return made().deposit("a", 5, state=5, seq_nr=1).deposit("b", 1, state=6, seq_nr=2).logged("a", "b")


@pytest.mark.parametrize(
    ("history", "rules"),
    [
        (two().caused("a", "b"), set()),
        (two().caused("b", "a"), {CAUSED}),
        (two().caused("b", "a", effect="entry"), set()),  # workers claim in no particular order
        (two().caused("a"), {CAUSED}),
        (two().caused("a", "b", "b"), {CAUSED}),
        (two().caused("a", "b", "c"), {CAUSED}),
    ],
)
def test_planted_in_what_is_caused(history: Script, rules: set[str]) -> None:
    assert history.broken() == rules
