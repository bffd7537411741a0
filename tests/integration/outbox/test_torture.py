"""Relays killed and stopped at random: every committed message arrives exactly once, in order per key."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
WRITERS = 4
LOCK_LIMIT_S = 2.0
#: Longer than the lock limit: a relay that is stopped so long has lost its topics when it continues.
STOPPED_S = (2.1, 4.0)
#: Longer than a relay takes to end by its own limits (`stop_s`, then `JOIN_S`), and a slow machine to run it.
END_S_MAX = 120.0
LOG_LINES_SHOWN = 200
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
        self.killed_pids: set[int] = set()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tidebook.cli.app", "outbox", "relay", "--threads", "2"]
        with (self._folder / "relays.log").open("ab") as log:
            return subprocess.Popen([*command, "--book", "tidebook.toml"], cwd=self._folder, stdout=log, stderr=log)

    def disturb(self) -> None:
        """Kill one or stop one; continue those that were stopped long enough."""
        self.resume(time.monotonic())
        which = self._chance.randrange(RELAYS)
        process = self._processes[which]
        assert process.poll() is None, f"relay {process.pid} ended by itself with exit code {process.returncode}"
        if self._chance.random() < 0.5 or which in self._stopped:
            self.kills += 1
            self.killed_pids.add(process.pid)
            process.kill()
            process.wait()
            self._stopped.pop(which, None)
            self._processes[which] = self._start()
        else:
            self.stops += 1
            process.send_signal(signal.SIGSTOP)
            self._stopped[which] = time.monotonic() + self._chance.uniform(*STOPPED_S)

    def resume(self, now: float) -> None:
        for which, until_ in list(self._stopped.items()):
            if until_ <= now:
                self._processes[which].send_signal(signal.SIGCONT)
                del self._stopped[which]

    def holds_killed_lock(self, owner: str) -> bool:
        """Return whether a killed relay holds this lock; it is taken over only once a message waits."""
        _, pid, _, _ = owner.rsplit(":", 3)
        return int(pid) in self.killed_pids

    def end(self) -> None:
        """Ask all processes to end, and wait for them."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        slow = []
        for process in self._processes:
            try:
                process.wait(END_S_MAX)
            except subprocess.TimeoutExpired:
                slow.append(process.pid)
                process.kill()
                process.wait()
        assert not slow, f"relays {slow} did not end within {END_S_MAX} s"

    def print_log(self) -> None:
        """Print the end of the relays' log, which pytest shows if the test fails."""
        lines = (self._folder / "relays.log").read_text(errors="replace").splitlines()
        print(*lines[-LOG_LINES_SHOWN:], sep="\n")


@contextmanager
def relays(folder: Path, chance: random.Random) -> Iterator[Relays]:
    made = Relays(folder, chance)
    try:
        yield made
    finally:
        try:
            made.end()
        finally:
            made.print_log()


class Keys:
    """What was committed, by key; a key belongs to one transaction at a time, so commits are serial per key."""

    def __init__(self) -> None:
        self._next: Counter[int] = Counter()
        self._locks = [threading.Lock() for _ in range(KEYS)]

    def take(self, key: int) -> bool:
        return self._locks[key].acquire(blocking=False)

    def next(self, key: int) -> int:
        return self._next[key]

    def give(self, keys: Counter[int], *, committed: bool) -> None:
        for key, many in keys.items():
            if committed:
                self._next[key] += many
            self._locks[key].release()

    def expected(self) -> dict[bytes, list[int]]:
        return {str(key).encode(): list(range(many)) for key, many in self._next.items()}

    def committed(self) -> int:
        return self._next.total()


class Writer:
    """A writer whose transactions overlap with others'; some are rolled back, and some commit late."""

    def __init__(self, database: Database, topics: list[str], keys: Keys, chance: random.Random) -> None:
        self._topics = topics
        self._keys = keys
        self._chance = chance
        self._connection = database._connect()
        self._late = database._connect()
        self._late_keys: Counter[int] = Counter()

    def write(self, count: int) -> None:
        """Write `count` messages in short transactions; then end the previous late transaction and begin another."""
        while count > 0:
            taken = self._publish(self._connection)
            if self._chance.random() < 0.1:
                self._connection.rollback()
                self._keys.give(taken, committed=False)
            else:
                self._connection.commit()
                self._keys.give(taken, committed=True)
                count -= taken.total()
        self.end_late()
        self._late_keys = self._publish(self._late)

    def _publish(self, connection: Any) -> Counter[int]:
        """Publish in two calls, between which other transactions draw ids."""
        wanted = Counter(self._chance.randrange(KEYS) for _ in range(self._chance.randint(1, 20)))
        taken = Counter({key: many for key, many in wanted.items() if self._keys.take(key)})
        messages = [
            Message(self._topics[key % TOPICS], f"{key}:{self._keys.next(key) + n}".encode(), key=str(key).encode())
            for key, many in taken.items()
            for n in range(many)
        ]
        half = self._chance.randint(0, len(messages))
        for part in (messages[:half], messages[half:]):
            if part:
                outbox.publish_list(connection, part)
        return taken

    def end_late(self) -> None:
        self._late.commit()
        self._keys.give(self._late_keys, committed=True)
        self._late_keys = Counter()

    def close(self) -> None:
        self._connection.close()
        self._late.close()


@contextmanager
def writers(
    database: Database, topics: list[str], keys: Keys, chance: random.Random
) -> Iterator[Callable[[int], object]]:
    """Yield a function that writes this many messages per call, with several concurrent writers."""
    made = [Writer(database, topics, keys, random.Random(chance.random())) for _ in range(WRITERS)]
    try:
        with ThreadPoolExecutor(WRITERS) as pool:
            yield lambda count: [*pool.map(lambda each: each.write(count // WRITERS), made)]
        for each in made:
            each.end_late()
    finally:
        for each in made:
            each.close()


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
    keys = Keys()
    settings = OutboxSettings(lock_limit_s=LOCK_LIMIT_S)
    with relays(tmp_path, chance) as running:
        with writers(postgres, topics, keys, chance) as write:
            for _ in range(rounds):
                write(messages // rounds)
                running.disturb()
                time.sleep(chance.uniform(0.3, 1.2))  # the faults' own rhythm
        running.resume(float("inf"))
        until(lambda: postgres.waiting() == 0, "everything is sent", timeout_s=300)
    with opened_store(postgres, settings) as store:
        status = store.status(count_max=10)
    assert not [each for each in status if each.dirty]
    # A relay that is killed after another one emptied its topic leaves the lock: nobody needs it, so nobody takes it.
    assert not [each for each in status if each.locked_by and not running.holds_killed_lock(each.locked_by)]
    assert not [each for each in status if each.notice]
    assert sum(each.relayed for each in status) == keys.committed()
    assert running.kills + running.stops == rounds
    wrong = faults(arrived(cluster, topics), keys.expected())
    assert not wrong, f"after {running.kills} kills and {running.stops} stops"
