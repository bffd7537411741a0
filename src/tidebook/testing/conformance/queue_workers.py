"""Test cases of a queue store: workers report themselves, and silent ones are listed as gone."""

from __future__ import annotations

from tidebook.queue.port import WORKER_FORGOTTEN_MS, WORKER_GONE_MS, QueueStore, WorkerReport
from tidebook.testing.conformance.queue_base import START_MS, Advance, OpenQueues, QueueBase, QueueTester, new_queue

FIRST, SECOND = b"1" * 16, b"2" * 16


class WorkerCases(QueueBase):
    """Test cases of the table of workers."""

    async def test_a_worker_is_listed_with_its_last_report(
        self, tester: QueueTester, store: QueueStore, open_queues: OpenQueues, advance: Advance
    ) -> None:
        other = await new_queue(store)
        await store.report_worker(tester.ref, WorkerReport(FIRST, "host:1", 10, 0, 0, 0))
        await store.report_worker(other, WorkerReport(SECOND, "host:2", 1, 0, 0, 0))
        await advance(500)
        async with open_queues() as another:
            await another.report_worker(tester.ref, WorkerReport(FIRST, "host:1", 10, 3, 40, 2))
        [found] = await store.workers(tester.ref)
        assert (found.id, found.name, found.concurrency) == (FIRST, "host:1", 10)
        assert (found.running, found.done, found.failed) == (3, 40, 2)
        assert (found.started_at, found.reported_at, found.gone) == (START_MS, START_MS + 500, False)

    async def test_the_latest_report_is_listed_first(self, tester: QueueTester, advance: Advance) -> None:
        await tester.store.report_worker(tester.ref, WorkerReport(FIRST, "host:1", 1, 0, 0, 0))
        await advance(1)
        await tester.store.report_worker(tester.ref, WorkerReport(SECOND, "host:2", 1, 0, 0, 0))
        assert [each.name for each in await tester.store.workers(tester.ref)] == ["host:2", "host:1"]
        assert [each.name for each in await tester.store.workers(tester.ref, limit=1)] == ["host:2"]

    async def test_a_removed_worker_is_not_listed(self, tester: QueueTester) -> None:
        await tester.store.report_worker(tester.ref, WorkerReport(FIRST, "host:1", 1, 0, 0, 0))
        await tester.store.remove_worker(tester.ref, FIRST)
        await tester.store.remove_worker(tester.ref, FIRST)
        assert await tester.store.workers(tester.ref) == []

    async def test_a_silent_worker_is_gone_and_later_forgotten(self, tester: QueueTester, advance: Advance) -> None:
        await tester.store.report_worker(tester.ref, WorkerReport(FIRST, "host:1", 1, 1, 0, 0))
        await advance(WORKER_GONE_MS)
        [found] = await tester.store.workers(tester.ref)
        assert not found.gone
        await advance(1)
        [found] = await tester.store.workers(tester.ref)
        assert found.gone
        await advance(WORKER_FORGOTTEN_MS)
        await tester.store.report_worker(tester.ref, WorkerReport(SECOND, "host:2", 1, 0, 0, 0))
        assert [each.name for each in await tester.store.workers(tester.ref)] == ["host:2"]

    async def test_a_worker_that_was_silent_for_long_reports_itself_again(
        self, tester: QueueTester, advance: Advance
    ) -> None:
        await tester.store.report_worker(tester.ref, WorkerReport(FIRST, "host:1", 1, 1, 0, 0))
        await advance(WORKER_FORGOTTEN_MS + 1)
        await tester.store.report_worker(tester.ref, WorkerReport(FIRST, "host:1", 1, 1, 7, 0))
        [found] = await tester.store.workers(tester.ref)
        assert (found.done, found.gone) == (7, False)
