"""Periodic cleaning, status and metrics of a region, backpressure and closing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.integration.wal.base import held_records, make_wal
from tests.integration.wal.faulty import FaultyLog
from tidebook.core.errors import Fenced, InvalidInput
from tidebook.log.sqlite import SqliteLog
from tidebook.runtime.clock import RandomIds, SystemClock
from tidebook.runtime.metrics import Metrics
from tidebook.wal.meta import Pinned
from tidebook.wal.record import Written
from tidebook.wal.region import Region
from tidebook.wal.settings import WalSettings
from tidebook.wal.wal import Wal


class ManualClock(SystemClock):
    def __init__(self) -> None:
        self.now = 1_000_000

    def now_ms(self) -> int:
        return self.now


@pytest_asyncio.fixture
async def log(tmp_path: Path) -> AsyncIterator[FaultyLog]:
    log = SqliteLog(tmp_path)
    yield FaultyLog(log)
    await log.close()


async def test_the_cleaner_runs_by_itself_and_survives_a_failure(log: FaultyLog) -> None:
    rounds: asyncio.Queue[Pinned] = asyncio.Queue()
    wal = make_wal(log, "b", clean_every_s=0.01, force_flush_bytes=1)
    region = await wal.open_region(7, create=True, on_pinned=rounds.put_nowait)
    await region.write(1, [b"x"])
    await rounds.get()
    log.reads_fail = True
    await rounds.get()
    while (await region.status()).cleaner_error is None:
        await rounds.get()
    log.reads_fail = False
    while (await region.status()).cleaner_error is not None:
        await rounds.get()
    await wal.close()


async def test_the_cleaner_writes_a_snapshot_after_the_configured_bytes(log: FaultyLog) -> None:
    rounds: asyncio.Queue[Pinned] = asyncio.Queue()
    wal = make_wal(log, "b", clean_every_s=0.01, force_flush_bytes=1, snapshot_every_bytes=1000)
    region = await wal.open_region(7, create=True, on_pinned=rounds.put_nowait)
    await region.write(1, [b"x" * 2000])
    while (await region.status()).snapshot_age_ms is None:
        await rounds.get()
    await wal.close()


async def test_status_and_metrics_report_held_bytes_and_the_pinning_table(log: FaultyLog) -> None:
    clock, metrics = ManualClock(), Metrics()
    wal = Wal(log, "m", clock=clock, ids=RandomIds(), metrics=metrics, settings=WalSettings(clean_every_s=0))
    region = await wal.open_region(7, create=True)
    await region.write(3, [b"x" * 5000])
    await region.write(4, [b"y" * 5000])
    status = await region.status()
    assert (status.region, status.term, status.tables, status.pinned_by) == (7, 1, 2, 3)
    assert 10_000 < status.held_bytes < 12_000
    assert status.snapshot_age_ms is None
    await region.clean()
    clock.now += 2_000
    await region.clean()
    samples = {name: value for name, labels, value in metrics.samples() if ("region", "7") in labels}
    assert samples["wal_held_bytes"] == status.held_bytes
    assert samples["wal_pinned_by_table"] == 3
    assert samples["wal_tables"] == 2
    assert samples["wal_recovery_seconds_count"] == 1
    assert samples["wal_snapshot_age_seconds"] == 2
    assert (await region.status()).snapshot_age_ms == 2_000
    reader = await wal.open_region(7, writable=False)
    assert (await reader.status()).snapshot_age_ms == 2_000
    await wal.close()


async def test_closing_resolves_accepted_writes_and_refuses_later_ones(log: FaultyLog) -> None:
    region = await make_wal(log, "c").open_region(7, create=True)
    writes = [asyncio.ensure_future(region.write(1, [b"%d" % n])) for n in range(20)]
    await asyncio.sleep(0)
    await region.close()
    assert [w.first for w in await asyncio.gather(*writes)] == list(range(1, 21))
    with pytest.raises(Exception, match="closed"):
        await region.write(1, [b"late"])


async def write_without_rest(region: Region, stop: asyncio.Event) -> None:
    """Keep a write in flight at all times."""

    async def one() -> None:
        while not stop.is_set():
            await region.write(2, [b"x"])

    await asyncio.gather(*(one() for _ in range(4)))


async def test_a_drop_does_not_wait_for_later_writes(log: FaultyLog) -> None:
    region = await make_wal(log, "s", pack_bytes=1, in_flight_max=2).open_region(7, create=True)
    await region.write(1, [b"x"])
    stop = asyncio.Event()
    writing = asyncio.create_task(write_without_rest(region, stop))
    await region.write(1, [b"y"])
    await asyncio.wait_for(region.drop_table(1), 10)
    assert list(region.meta.tables) == [2]
    stop.set()
    await writing


async def test_closing_does_not_wait_for_later_writes(log: FaultyLog) -> None:
    region = await make_wal(log, "s", pack_bytes=1, in_flight_max=2).open_region(7, create=True)
    writing = asyncio.create_task(write_without_rest(region, asyncio.Event()))
    await region.write(1, [b"y"])
    await asyncio.wait_for(region.close(), 10)
    with pytest.raises(Fenced, match="closed"):
        await writing


async def test_closing_wakes_writers_that_wait_for_room(log: FaultyLog) -> None:
    region = await make_wal(log, "s", pending_bytes_max=100, in_flight_max=1, pack_bytes=1).open_region(7, create=True)
    writes = [asyncio.ensure_future(region.write(1, [b"x" * 300])) for _ in range(20)]
    await asyncio.sleep(0)
    await asyncio.wait_for(region.close(), 10)
    answers = await asyncio.wait_for(asyncio.gather(*writes, return_exceptions=True), 10)
    written = [answer for answer in answers if isinstance(answer, Written)]
    assert [w.first for w in written] == list(range(1, len(written) + 1))
    assert all(isinstance(answer, Written | Fenced) for answer in answers)


async def test_writes_of_many_types_that_share_a_record_keep_to_the_limit(log: FaultyLog) -> None:
    region = await make_wal(log, "l", limit_bytes=2_000, pack_bytes=1_000_000).open_region(7, create=True)
    await asyncio.gather(*(region.write(1, [b"" if n % 9 else "t"] * 20) for n in range(200)))
    sizes = [len(record.value or b"") for record in await held_records(log, "wal.l.7.data")]
    assert 1_000 < max(sizes) <= 2_000


async def test_writers_wait_while_too_much_is_pending(log: FaultyLog) -> None:
    region = await make_wal(log, "p", pending_bytes_max=1_000, in_flight_max=1, pack_bytes=500).open_region(
        7, create=True
    )
    written = await asyncio.gather(*(region.write(1, [b"x" * 300]) for _ in range(50)))
    assert sorted(w.first for w in written) == list(range(1, 51))


@pytest.mark.parametrize("bad", [{"limit_bytes": 10}, {"pack_bytes": 0}, {"clean_every_s": -1}, {"attempts_max": 0}])
def test_invalid_settings_are_rejected(bad: dict[str, int]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(bad))):
        WalSettings(**bad)
