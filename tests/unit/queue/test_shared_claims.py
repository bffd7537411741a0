"""Claims that share a call get what is due, and call again while others got something."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tidebook.core.errors import TidebookError, Unavailable
from tidebook.queue.shared_claims import share_claims

#: A claim: its lease, by which claims are grouped, and its limit.
Request = tuple[str, int]


class Source:
    """Returns one batch of entries a call; raises a batch that is an error."""

    def __init__(self, *batches: list[str] | TidebookError) -> None:
        self._batches = list(batches)
        self.calls: list[tuple[str, list[int]]] = []

    async def __call__(self, lease: str, requests: Sequence[Request]) -> list[list[str]]:
        self.calls.append((lease, [limit for _, limit in requests]))
        batch = self._batches.pop(0) if self._batches else []
        if isinstance(batch, TidebookError):
            raise batch
        shares = []
        for _, limit in requests:
            shares.append(batch[:limit])
            batch = batch[limit:]
        return shares


def lease_of(request: Request) -> str:
    return request[0]


async def test_claims_of_one_kind_share_a_call_and_are_served_in_order() -> None:
    source = Source(["a", "b", "c"])
    assert await share_claims([("s", 2), ("s", 1)], lease_of, source) == [["a", "b"], ["c"]]
    assert source.calls == [("s", [2, 1])]


async def test_each_kind_has_its_own_call() -> None:
    source = Source(["a"], ["b"])
    assert await share_claims([("s", 1), ("t", 1)], lease_of, source) == [["a"], ["b"]]
    assert source.calls == [("s", [1]), ("t", [1])]


async def test_a_claim_that_got_nothing_calls_again() -> None:
    source = Source(["a"], ["slow"])
    assert await share_claims([("s", 1), ("s", 1)], lease_of, source) == [["a"], ["slow"]]
    assert source.calls == [("s", [1, 1]), ("s", [1])]


async def test_a_claim_that_got_less_than_its_limit_does_not_call_again() -> None:
    source = Source(["a"], ["b"])
    assert await share_claims([("s", 2)], lease_of, source) == [["a"]]
    assert len(source.calls) == 1


async def test_a_call_that_returns_nothing_ends_the_calls() -> None:
    source = Source(["a"], [], ["too late"])
    assert await share_claims([("s", 1), ("s", 1), ("s", 1)], lease_of, source) == [["a"], [], []]
    assert source.calls == [("s", [1, 1, 1]), ("s", [1, 1])]


@pytest.mark.parametrize("served", [[], ["a"]])
async def test_an_error_reaches_only_the_claims_without_entries(served: list[str]) -> None:
    error = Unavailable("the store is down")
    source = Source(*([served] if served else []), error)
    claims = [("s", 1), ("s", 1)]
    assert await share_claims(claims, lease_of, source) == ([["a"], error] if served else [error, error])
