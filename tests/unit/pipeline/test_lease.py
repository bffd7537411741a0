"""Leases on paper: how partitions are shared, and how a run ends its own leases and nobody else's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import tidebook
from tidebook.core.errors import InvalidInput
from tidebook.pipeline.lease import REVOKED_SETTING, RUNS_MAX, Lease, is_revoked, revoke_leases
from tidebook.pipeline.lease_scheduler import share_partitions
from tidebook.pipeline.session import PipelineSettings
from tidebook.wiring.book import Book


@pytest_asyncio.fixture
async def book(tmp_path: Path) -> AsyncIterator[Book]:
    async with tidebook.open(tmp_path / "book") as book:
        await book.journal("orders").create()
        yield book


def lease(run: str, generation: int) -> Lease:
    return Lease(run, generation, (), {}, 1.0)


def test_every_partition_has_one_lane_and_lanes_are_even() -> None:
    partitions = [("a", number) for number in range(7)]
    shares = share_partitions([], partitions, 3)
    assert sorted(at for share in shares for at in share) == partitions
    assert sorted(map(len, shares)) == [2, 2, 3]


def test_there_are_no_more_lanes_than_partitions() -> None:
    assert share_partitions([], [("a", 0)], 8) == [(("a", 0),)]


def test_partitions_stay_in_their_lane_when_others_join() -> None:
    before = share_partitions([], [("b", 0), ("b", 1)], 2)
    after = share_partitions(before, [("a", 0), ("a", 1), ("b", 0), ("b", 1)], 2)
    assert all(set(old) < set(new) for old, new in zip(before, after, strict=True))


def test_partitions_of_a_topic_that_is_gone_leave_their_lane() -> None:
    before = share_partitions([], [("a", 0), ("b", 0), ("b", 1)], 2)
    assert sorted(at for share in share_partitions(before, [("b", 0), ("b", 1)], 2) for at in share) == [
        ("b", 0),
        ("b", 1),
    ]


async def test_a_run_revokes_its_earlier_generations_alone(book: Book) -> None:
    assert not await is_revoked(book.store, lease("one", 1))
    await revoke_leases(book.store, "one", 2)
    assert await is_revoked(book.store, lease("one", 1))
    assert not await is_revoked(book.store, lease("one", 2))
    assert not await is_revoked(book.store, lease("two", 1))


async def test_only_recent_runs_are_remembered(book: Book) -> None:
    for number in range(RUNS_MAX + 5):
        await revoke_leases(book.store, f"run-{number}", 2)
    assert not await is_revoked(book.store, lease("run-0", 1))
    assert await is_revoked(book.store, lease(f"run-{RUNS_MAX + 4}", 1))
    assert len((await book.store.setting(REVOKED_SETTING) or "").split(",")) == RUNS_MAX


@pytest.mark.parametrize("wrong", [{"lease_s": 1.0}, {"lease_s": -1.0}, {"catch_up_records": -1}])
def test_settings_that_cannot_be_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInput):
        PipelineSettings(**wrong)  # type: ignore[arg-type]
