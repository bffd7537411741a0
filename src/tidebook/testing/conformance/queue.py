"""What every queue store must do.

class TestMyQueues(QueueContract):
takes_transactions = False

@pytest.fixture
def open_queues(self, tmp_path): ...  # an async context manager, each time on the same data

@pytest.fixture
def advance(self): ...  # moves the clock that they go by
"""

from __future__ import annotations

from tidebook.sql.port.queue import QueueStore
from tidebook.testing.conformance.queue_base import Advance, OpenQueues
from tidebook.testing.conformance.queue_claiming import ClaimingCases
from tidebook.testing.conformance.queue_leases import FailCases, LeaseCases
from tidebook.testing.conformance.queue_looking import FlagCases, LookingCases
from tidebook.testing.conformance.queue_putting import PuttingCases
from tidebook.testing.conformance.queue_together import TogetherCases

__all__ = ["Advance", "OpenQueues", "QueueContract"]


class QueueContract(PuttingCases, ClaimingCases, LeaseCases, FailCases, LookingCases, FlagCases, TogetherCases):
    """Subclass it, declare the capability, give `open_queues` and `advance`."""

    async def test_the_declared_capability_is_that_of_the_store(self, store: QueueStore) -> None:
        assert store.takes_transactions == self.takes_transactions
