"""Concurrent claims share a call; a claim that gets nothing calls again if another claim of the call got something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import pytest

from tidebook.core.errors import LeaseLost, TidebookError, Unavailable
from tidebook.core.payload import BYTES
from tidebook.queue.job import Job
from tidebook.queue.port import (
    Claimed,
    DeadLetterRow,
    FinishingClaim,
    LeasedEntry,
    QueueRef,
    QueueSettings,
    limits_without_loss,
)
from tidebook.queue.queue import ClaimCall, Queue
from tidebook.queue.runtime import QueueRuntime
from tidebook.runtime.clock import RandomIds, SystemClock
from tidebook.runtime.metrics import Metrics


class Source:
    """A store whose claims return the given batches in turn, or raise a batch that is an error."""

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

    async def finish_and_claim(
        self, queue: QueueRef, claims: Sequence[FinishingClaim], *, lease_ms: int, together: bool
    ) -> tuple[Set[LeasedEntry], list[Claimed]]:
        """Finish jobs whose data begin with 'held'; all others have lost their lease."""
        finished = {each for one in claims for each in one.finished if each.keyhash.startswith(b"held")}
        limits = limits_without_loss(claims, finished)
        return finished, await self.claim(queue, limits, lease_ms=lease_ms, together=together)

    async def close(self) -> None: ...


async def outcomes_of(source: Source, calls: list[ClaimCall]) -> list[Any]:
    """Return the data, or the error, of concurrent claims."""

    async def open_store() -> Any:
        return source

    runtime = QueueRuntime(open_store, clock=SystemClock(), ids=RandomIds(), metrics=Metrics())
    outcomes = await Queue("mail", runtime)._claim_group(calls)
    await runtime.close()
    return [each if isinstance(each, BaseException) else [job.data.decode() for job in each] for each in outcomes]


def finished_job(name: str) -> Job[Any]:
    return Job(
        "mail",
        Claimed(0, 0, name.encode(), name, 100, 0, 0, 0, 0, 0, 0, 0, BYTES, b"", b"token"),
        lambda claimed: claimed.data,
    )


async def claims_of(source: Source, *requests: tuple[int, int], together: bool = True) -> list[Any]:
    """Return the data, or the error, of concurrent claims, each given as lease and limit."""
    return await outcomes_of(source, [ClaimCall(limit, lease_ms, together) for lease_ms, limit in requests])


@pytest.mark.parametrize("together", [False, True])
async def test_claims_with_equal_leases_share_a_call_and_are_served_in_order(together: bool) -> None:
    source = Source(["a", "b", "c"])
    assert await claims_of(source, (60, 2), (60, 1), together=together) == [["a", "b"], ["c"]]
    assert source.calls == [(60, [2, 1] if together else [3])]


async def test_claims_with_different_leases_do_not_share_a_call() -> None:
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


@pytest.mark.parametrize("together", [False, True])
async def test_a_lost_lease_is_the_error_of_its_caller_alone(together: bool) -> None:
    source = Source(["a", "b"])
    calls = [ClaimCall(1, 60, together, finished=[finished_job(name)]) for name in ("held 1", "lost", "held 2")]
    first, lost, last = await outcomes_of(source, calls)
    assert (first, last) == (["a"], ["b"])
    assert isinstance(lost, LeaseLost)
    assert "lost" in str(lost)
    assert source.calls == [(60, [1, 1] if together else [2])]


async def test_jobs_are_finished_once_if_a_claim_calls_again() -> None:
    error = Unavailable("the store is down")
    calls = [
        ClaimCall(1, 60, False, finished=[finished_job("held 1")]),
        ClaimCall(1, 60, False),
        ClaimCall(1, 60, False),
    ]
    source = Source(["a"], error)
    # The claim of the caller that finished a job got "a"; only the second call fails, for the claims that got nothing.
    assert await outcomes_of(source, calls) == [["a"], error, error]
    # A caller whose job was finished by the first call gets no error from the second one, but an empty result.
    calls = [ClaimCall(1, 60, False), ClaimCall(1, 60, False, finished=[finished_job("held 1")])]
    assert await outcomes_of(Source(["a"], error), calls) == [["a"], []]
    # If the first call fails, it is not known to have finished the job.
    assert await outcomes_of(Source(error), calls) == [error, error]
