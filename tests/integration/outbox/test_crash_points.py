"""A relay that dies between any two of its steps: every message arrives once, in order per key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.outbox.checker import arrived, faults
from tests.integration.outbox.conftest import EVERY_DATABASE
from tests.integration.outbox.databases import Database
from tests.integration.outbox.relaying import Cluster, opened_store, publish, running, until
from tidebook.outbox.settings import OutboxSettings

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(600)]

KEYS = 3
MESSAGES = 900
#: More calls than two batches make.
CALLS = 20


EVERY_PAIR = [
    pytest.param(*each.values, fence, marks=[*each.marks, *(() if first and not n else (pytest.mark.long,))])
    for n, each in enumerate(EVERY_DATABASE)
    for first, fence in ((True, "timestamp"), (False, "transaction"))
]


@pytest.mark.parametrize(("empty_database", "fence"), EVERY_PAIR, indirect=["empty_database"])
def test_a_relay_that_dies_at_any_call_sends_everything_once_and_in_order(
    database: Database, cluster: Cluster, tmp_path: Path, fence: str
) -> None:
    topic = cluster.topic()
    pairs = [(str(n % KEYS).encode(), f"{n % KEYS}:{n // KEYS}".encode()) for n in range(MESSAGES)]
    publish(database, topic, *pairs)
    book = tmp_path / "tidebook.toml"
    book.write_text(
        f'folder = "book"\n[log]\nurl = "kafka://{cluster.bootstrap}"\n[sql]\nurl = "{database.url}"\n'
        f'[outbox]\nfence = "{fence}"\nbatch_rows = 6\nlock_limit_s = 1\nrest_s = 0.2\npoll_s = 0.1\n'
    )
    command = [sys.executable, "-m", "tests.integration.outbox.dying_calls", str(book), str(CALLS)]
    subprocess.run(command, timeout=500, check=True)
    assert 0 < database.waiting() < MESSAGES
    settings = OutboxSettings(lock_limit_s=1, rest_s=0.2, poll_s=0.1, fence=fence)  # type: ignore[arg-type]
    with running(cluster.relay(database, settings)):
        until(lambda: database.waiting() == 0, "everything is sent")
    with opened_store(database, settings) as store:
        [status] = store.status(count_max=10)
    assert (status.dirty, status.notice, status.relayed) == (False, None, MESSAGES)
    assert not faults(arrived(cluster, [topic]), {str(k).encode(): list(range(MESSAGES // KEYS)) for k in range(KEYS)})
