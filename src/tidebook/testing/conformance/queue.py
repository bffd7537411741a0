"""The conformance suite of queue stores. An adapter's tests subclass it:

    class TestMyQueues(QueueContract):
        takes_transactions = False

        @pytest.fixture
        def open_queues(self, tmp_path):
            return lambda: open_my_queues(tmp_path)

        @pytest.fixture
        def advance(self):
            ...return an async function that advances the clock of all stores by some milliseconds

Each call of `open_queues` returns an async context manager of another store on the same data.
"""

from __future__ import annotations

from tidebook.queue.port import QueueStore
from tidebook.testing.conformance.queue_base import Advance, OpenQueues
from tidebook.testing.conformance.queue_batch_claims import BatchClaimCases
from tidebook.testing.conformance.queue_browsing import BrowsingCases
from tidebook.testing.conformance.queue_claiming import ClaimingCases
from tidebook.testing.conformance.queue_leases import FailCases, LeaseCases
from tidebook.testing.conformance.queue_pausing import PausingCases
from tidebook.testing.conformance.queue_putting import PuttingCases
from tidebook.testing.conformance.queue_reads import DeadLetterCases, QueueReadCases
from tidebook.testing.conformance.queue_workers import WorkerCases

__all__ = ["Advance", "OpenQueues", "QueueContract"]


class QueueContract(
    PuttingCases,
    ClaimingCases,
    LeaseCases,
    FailCases,
    PausingCases,
    WorkerCases,
    QueueReadCases,
    DeadLetterCases,
    BatchClaimCases,
    BrowsingCases,
):
    """Subclass it, declare the capability, and provide the fixtures `open_queues` and `advance`."""

    async def test_the_declared_capability_is_that_of_the_store(self, store: QueueStore) -> None:
        assert store.takes_transactions == self.takes_transactions
