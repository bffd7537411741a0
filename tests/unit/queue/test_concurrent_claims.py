"""Claims that share a call get what is due, and call again while others got something."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tidebook.core.errors import TidebookError, Unavailable
from tidebook.core.payload import BYTES
from tidebook.queue.port import Claimed, DeadLetterRow, QueueRef, QueueSettings
from tidebook.queue.queue import ClaimCall, Queue
from tidebook.queue.runtime import QueueRuntime
from tidebook.runtime.clock import RandomIds, SystemClock
from tidebook.runtime.metrics import Metrics


class Source:
    """A store of which each claim returns one batch of entries, or raises it if it is an error."""

    def __init__(self, *batches: list[str] | TidebookError) -> None:
        self._batches = list(batches)
        #: The lease and the limits of each call.
        self.calls: list[tuple[int, list[int]]] = []

    async def dead_letters(self, *_: object, **__: object) -> list[DeadLetterRow]:
        return []

    async def queue(self, name: str, settings: QueueSettings | None = None) -> QueueRef:
        return QueueRef(1, name, QueueSettings())

    async def claim(
        self, queue: QueueRef, limits: Mapping[bytes, int], *, lease_ms: int, together: bool
    ) -> list[Claimed]:
        self.calls.append((lease_ms, list(limits.values())))
        batch = self._batches.pop(0) if self._batches else []
        if isinstance(batch, TidebookError):
            raise batch
        tokens = [token for token, limit in limits.items() for _ in range(limit)]
        return [
            Claimed(0, number, data.encode(), None, 100, 0, 0, 0, 0, 0, 0, 0, BYTES, data.encode(), token)
            for number, (data, token) in enumerate(zip(batch, tokens, strict=False))
        ]

    async def close(self) -> None: ...


async def claims_of(source: Source, *requests: tuple[int, int], together: bool = True) -> list[Any]:
    """Return the data, or the error, of concurrent claims, each given as its lease and its limit."""

    async def open_store() -> Any:
        return source

    runtime = QueueRuntime(open_store, clock=SystemClock(), ids=RandomIds(), metrics=Metrics())
    queue = Queue("mail", runtime)
    outcomes = await queue._claim_group([ClaimCall(limit, lease_ms, together) for lease_ms, limit in requests])
    await runtime.close()
    return [each if isinstance(each, BaseException) else [job.data.decode() for job in each] for each in outcomes]


@pytest.mark.parametrize("together", [False, True])
async def test_claims_of_one_kind_share_a_call_and_are_served_in_order(together: bool) -> None:
    source = Source(["a", "b", "c"])
    assert await claims_of(source, (60, 2), (60, 1), together=together) == [["a", "b"], ["c"]]
    assert source.calls == [(60, [2, 1] if together else [3])]


async def test_each_kind_has_its_own_call() -> None:
    source = Source(["a"], ["b"])
    assert await claims_of(source, (60, 1), (70, 1)) == [["a"], ["b"]]
    assert source.calls == [(60, [1]), (70, [1])]


async def test_a_claim_that_got_nothing_calls_again() -> None:
    source = Source(["a"], ["slow"])
    assert await claims_of(source, (60, 1), (60, 1)) == [["a"], ["slow"]]
    assert source.calls == [(60, [1, 1]), (60, [1])]


async def test_a_claim_that_got_less_than_its_limit_does_not_call_again() -> None:
    source = Source(["a"], ["b"])
    assert await claims_of(source, (60, 2)) == [["a"]]
    assert len(source.calls) == 1


async def test_a_call_that_returns_nothing_ends_the_calls() -> None:
    source = Source(["a"], [], ["too late"])
    assert await claims_of(source, (60, 1), (60, 1), (60, 1)) == [["a"], [], []]
    assert source.calls == [(60, [1, 1, 1]), (60, [1, 1])]


@pytest.mark.parametrize("served", [[], ["a"]])
async def test_an_error_reaches_only_the_claims_without_entries(served: list[str]) -> None:
    error = Unavailable("the store is down")
    source = Source(*([served] if served else []), error)
    found = await claims_of(source, (60, 1), (60, 1))
    assert found == ([["a"], error] if served else [error, error])
