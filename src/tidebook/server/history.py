"""The last hours of a few metrics, for charts: a ring of samples in `server.db`, so that no other service is needed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final

import apsw
import msgspec

from tidebook.api.monitoring import HistorySample
from tidebook.core.errors import TidebookError
from tidebook.replication.status import partition_statuses, topic_configs
from tidebook.server.database import ServerDatabase
from tidebook.wiring.book import Book

logger = logging.getLogger("tidebook.server")

SAMPLE_EVERY_S: Final = 10.0
#: Six hours.
SAMPLES_MAX: Final = 2_160
#: How long the log, the store and the outbox may take to report their lag.
REPORT_S_MAX: Final = 5.0
#: The share of time that reading the lag may take; in a book of many topics it is therefore read less often.
LAG_SHARE: Final = 0.1
#: Up to this many topics, every partition has gauges; with more, a partition gets them when it first lags.
TOPICS_REPORTED_MAX: Final = 1_000
#: How many topics are read between two pauses for other work.
TOPICS_AT_ONCE: Final = 20
#: The series by name, as exported without the prefix, and how the values of all labels are combined into one.
SERIES: Final[dict[str, Callable[[list[float]], float]]] = {
    "outbox_oldest_seconds": max,
    "outbox_parked": sum,
    "outbox_sent_total": sum,
    "outbox_waiting": sum,
    "pipeline_lag_records": sum,
    "pipeline_lag_seconds": max,
    "pipeline_parked_total": sum,
    "pipeline_records_total": sum,
    "pipeline_stopped_partitions": max,
    "queue_claimed_total": sum,
    "queue_dead_letters_announced_total": sum,
    "queue_done_total": sum,
    "queue_failed_total": sum,
    "queue_put_total": sum,
    "running_failures_total": sum,
    "server_open_streams": sum,
    "server_request_seconds_count": sum,
    "server_request_seconds_sum": sum,
    "sqlite_operations_total": sum,
    "tags_horizon_behind_seconds": max,
    "wal_held_bytes": sum,
    "wal_records_total": sum,
}
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, float]).decode


class History:
    """Samples the metrics of this process every ten seconds; the ring is bounded by its slots."""

    def __init__(self, book: Book, database: ServerDatabase) -> None:
        self._book = book
        self._database = database
        #: The partitions that have gauges, and when the gauges are set next.
        self._reported: set[tuple[str, int]] = set()
        self._lag_due_s = 0.0

    async def run(self) -> None:
        """Take samples until the task is cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            try:
                await self.sample()
            except TidebookError as error:
                logger.warning("a sample of the history is not written: %s", error)

    async def sample(self) -> None:
        """Write one sample in place of the oldest one."""
        await self._report_lag()
        values: dict[str, list[float]] = {}
        for sample in self._book.metrics.samples():
            if sample.name in SERIES:
                values.setdefault(sample.name, []).append(sample.value)
        row = _encode({name: SERIES[name](found) for name, found in values.items()})
        at_ms = self._book.clock.now_ms()
        slot = at_ms // int(SAMPLE_EVERY_S * 1000) % SAMPLES_MAX

        def write(connection: apsw.Connection) -> None:
            connection.execute("INSERT OR REPLACE INTO history (slot, at, sample) VALUES (?, ?, ?)", (slot, at_ms, row))

        await self._database.change(write, synced=False)

    def read(self, since_ms: int) -> list[HistorySample]:
        """Return the samples after a time, oldest first; samples older than the ring are left out."""
        now_ms = self._book.clock.now_ms()
        oldest_ms = max(since_ms, now_ms - int(SAMPLE_EVERY_S * 1000) * SAMPLES_MAX)
        rows: list[Any] = self._database.select("SELECT at, sample FROM history WHERE at > ? ORDER BY at", (oldest_ms,))
        return [HistorySample(at, [found.get(name) for name in SERIES]) for at, found in _decoded(rows)]

    async def _report_lag(self) -> None:
        """Set the gauges of replication and outbox, which other processes may run; do not change them on an error."""
        began_s = time.monotonic()
        if began_s < self._lag_due_s:
            return
        try:
            await self._report_partitions()
            async with asyncio.timeout(REPORT_S_MAX):
                await self._book.outbox.status()
        except TimeoutError:
            logger.warning("the lag is not known: the log, the store or the outbox does not answer")
        except TidebookError as error:
            logger.warning("the lag is not known: %s", error)
        ended_s = time.monotonic()
        self._lag_due_s = ended_s + (ended_s - began_s) / LAG_SHARE

    async def _report_partitions(self) -> None:
        """Set the gauges of all partitions, or, in a book of many topics, of those that lag or have lagged."""
        book = self._book
        async with asyncio.timeout(REPORT_S_MAX):
            names = await book.store.topics()
        for start in range(0, len(names), TOPICS_AT_ONCE):
            async with asyncio.timeout(REPORT_S_MAX):
                configs = await topic_configs(book.store, names[start : start + TOPICS_AT_ONCE])
                statuses = await partition_statuses(book.log, book.store, configs, now_ms=book.clock.now_ms())
            for each in statuses:
                at = (each.topic, each.partition)
                if len(names) <= TOPICS_REPORTED_MAX or each.lag or at in self._reported:
                    self._reported.add(at)
                    labels = {"topic": each.topic, "partition": each.partition}
                    book.metrics.gauge("pipeline_lag_records", each.lag, **labels)
                    book.metrics.gauge("pipeline_lag_seconds", each.lag_s, **labels)
            await asyncio.sleep(0)  # reads of an embedded book never yield to other tasks


def _decoded(rows: list[Any]) -> list[tuple[int, dict[str, float]]]:
    return [(at, _decode(sample)) for at, sample in rows]
