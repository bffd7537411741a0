"""Relays killed and stopped at random: every committed message arrives exactly once, in order per key."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.outbox.checker import arrived, faults
from tests.integration.outbox.databases import Database
from tests.integration.outbox.relaying import Cluster, opened_store, until
from tidebook import outbox
from tidebook.outbox import Message
from tidebook.outbox.settings import OutboxSettings

pytestmark = [pytest.mark.kafka, pytest.mark.postgres, pytest.mark.timeout(3600)]

TOPICS = 20
KEYS = 200
RELAYS = 4
LOCK_LIMIT_S = 2.0
#: Longer than the lock limit: whoever is stopped so long has lost its topics when it goes on.
STOPPED_S = (2.1, 4.0)
BOOK = """\
folder = "book"
[log]
url = "kafka://{kafka}"
[sql]
url = "{sql}"
[outbox]
fence = "{fence}"
lock_limit_s = {limit}
fence_s = 0.9
rest_s = 0.5
poll_s = 0.2
batch_rows = 100
create_tables = false
"""


class Relays:
    """Four processes of `tidebook outbox relay`."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self._folder = folder
        self._chance = chance
        self._processes = [self._start() for _ in range(RELAYS)]
        self._stopped: dict[int, float] = {}
        self.kills = self.stops = 0

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tidebook.cli.app", "outbox", "relay", "--threads", "2"]
        with (self._folder / "relays.log").open("ab") as log:
            return subprocess.Popen([*command, "--book", "tidebook.toml"], cwd=self._folder, stdout=log, stderr=log)

    def disturb(self) -> None:
        """Kill one, or stop one; and let go on those that were stopped long enough."""
        self.resume(time.monotonic())
        which = self._chance.randrange(RELAYS)
        process = self._processes[which]
        assert process.poll() is None, "a relay ended by itself"
        if self._chance.random() < 0.5:
            self.kills += 1
            process.kill()
            process.wait()
            self._stopped.pop(which, None)
            self._processes[which] = self._start()
        elif which not in self._stopped:
            self.stops += 1
            process.send_signal(signal.SIGSTOP)
            self._stopped[which] = time.monotonic() + self._chance.uniform(*STOPPED_S)

    def resume(self, now: float) -> None:
        for which, until_ in list(self._stopped.items()):
            if until_ <= now:
                self._processes[which].send_signal(signal.SIGCONT)
                del self._stopped[which]

    def end(self) -> None:
        """Ask all to end, and wait for it."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise


@contextmanager
def relays(folder: Path, chance: random.Random) -> Iterator[Relays]:
    made = Relays(folder, chance)
    try:
        yield made
    finally:
        made.end()


class Writer:
    """One writer, whose transactions are serial per key; some are rolled back."""

    def __init__(self, database: Database, topics: list[str], chance: random.Random) -> None:
        self._database = database
        self._topics = topics
        self._chance = chance
        self._next: Counter[int] = Counter()
        self.committed = 0

    def write(self, count: int) -> None:
        with self._database.connect() as connection:
            end = self.committed + count
            while self.committed < end:
                numbers = Counter(self._chance.randrange(KEYS) for _ in range(self._chance.randint(1, 20)))
                messages = [
                    Message(self._topics[key % TOPICS], f"{key}:{self._next[key] + n}".encode(), key=str(key).encode())
                    for key, many in numbers.items()
                    for n in range(many)
                ]
                outbox.publish_list(connection, messages)
                if self._chance.random() < 0.1:
                    connection.rollback()
                    continue
                connection.commit()
                self._next += numbers
                self.committed += len(messages)

    def expected(self) -> dict[bytes, list[int]]:
        return {str(key).encode(): list(range(many)) for key, many in self._next.items()}


@pytest.mark.parametrize("fence", ["timestamp", "transaction"])
def test_killed_and_stopped_relays_send_everything_once_and_in_order(
    postgres: Database, cluster: Cluster, tmp_path: Path, fence: str, long_form: bool
) -> None:
    rounds, messages = (200, 100_000) if long_form else (20, 10_000)
    seed = int(os.environ.get("TIDEBOOK_SEED", random.SystemRandom().randrange(10**9)))
    print(f"TIDEBOOK_SEED={seed}")
    chance = random.Random(seed)
    (tmp_path / "tidebook.toml").write_text(
        BOOK.format(kafka=cluster.bootstrap, sql=postgres.url, fence=fence, limit=LOCK_LIMIT_S)
    )
    topics = [cluster.topic() for _ in range(TOPICS)]
    writer = Writer(postgres, topics, chance)
    settings = OutboxSettings(lock_limit_s=LOCK_LIMIT_S)
    with relays(tmp_path, chance) as running:
        for _ in range(rounds):
            writer.write(messages // rounds)
            running.disturb()
            time.sleep(chance.uniform(0.3, 1.2))  # the faults' own rhythm
        running.resume(float("inf"))
        until(lambda: postgres.waiting() == 0, "everything went", timeout_s=300)
    with opened_store(postgres, settings) as store:
        status = store.status(count_max=10)
    assert not any(each.dirty or each.locked_by for each in status)
    assert not any(each.notice for each in status)
    assert sum(each.relayed for each in status) == writer.committed
    wrong = faults(arrived(cluster, topics), writer.expected())
    assert not wrong, f"after {running.kills} kills and {running.stops} stops"
