"""One seeded run of an outbox: publishers and relays that pause, stop and die, on a database and a log with faults.

The relay with its loops, the operations on the outbox's tables with their SQL, and the engine that runs it, in memory,
are real. The threads, the connections, PostgreSQL's visibility of rows from the commit on, crashes that lose commits
which did not wait for the disk, the log with its fences, and time are simulated.
"""

from __future__ import annotations

import itertools
import logging
import queue
import random
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal
from zlib import crc32

import msgspec

from tests.simulation.choices import RecordedChoices
from tests.simulation.thread_time import SimulatedProcess, ThreadScheduler
from tidebook.core.errors import Unavailable
from tidebook.outbox import port, relay, topic_relay
from tidebook.outbox.fence import Fence
from tidebook.outbox.message import order_key
from tidebook.outbox.migrations.tables import create_statements
from tidebook.outbox.relay import Relay
from tidebook.outbox.scan_floor import ScanFloors
from tidebook.outbox.settings import OutboxSettings
from tidebook.outbox.sql import SQL, StoreStatements
from tidebook.outbox.store import OutboxStore
from tidebook.outbox.topic_relay import RelayShutdown
from tidebook.runtime.metrics import Metrics
from tidebook.testing.histories.call import pair_lines
from tidebook.testing.histories.line import HistoryLine
from tidebook.testing.histories.outboxes import check_outbox
from tidebook.testing.histories.verdict import RuleVerdict

TROUBLE_S, QUIET_S = 6.0, 300.0
PARTITIONS = 2
KEYS = ("a", "b")
FENCES = (Fence.TIMESTAMP, Fence.TRANSACTION, Fence.LOCK)
START_MS = 1_000_000_000
LOCK_LIMIT_S = 3.0
STEP_S = 0.1
RETRY_S = 0.3
REFUSED = "the broker takes no message that large at this time"

# ---- the database

_STATEMENTS = StoreStatements(
    msgspec.structs.replace(
        SQL["sqlite"],
        now="now_ms()",
        later="(now_ms() + {0})",
        minute="(now_ms() / 60000)",
        transaction_numbers="oldest_running(), new_number()",
    )
)


def _open_engine() -> sqlite3.Connection:
    engine = sqlite3.connect(":memory:", isolation_level=None)
    for statement in create_statements("sqlite"):
        engine.execute(statement)
    return engine


#: One engine for all runs of a process: each run empties the tables.
_ENGINE: list[sqlite3.Connection] = []
#: The metrics of all runs of a process: thousands of relays would spend their time making them.
_METRICS = Metrics()


class Faults(msgspec.Struct):
    """The probability of each fault of a call, and the longest duration of a call."""

    refused: float = 0.0
    unanswered: float = 0.0
    poison: float = 0.0
    call_s_max: float = 0.01
    late_s_max: float = 0.05


class OpenTransaction(msgspec.Struct):
    """A publisher's transaction, with its number and the rows that become visible when it commits."""

    number: int
    rows: list[tuple[int, str, bytes | None, bytes]]
    state: Literal["open", "ready", "committed", "aborted"] = "open"


class SimulatedDatabase:
    """The tables. The engine's transaction stays open between two durable commits, so that a crash can roll it back."""

    def __init__(self, scheduler: ThreadScheduler, chance: random.Random, faults: Faults) -> None:
        self.scheduler, self.chance, self.faults = scheduler, chance, faults
        self.generation = 0
        self.open: list[OpenTransaction] = []
        self._ids, self._numbers = itertools.count(1), itertools.count(1)
        self._last_number = 0
        if not _ENGINE:
            _ENGINE.append(_open_engine())
        engine = self.engine = _ENGINE[0]
        engine.create_function("now_ms", 0, self.now_ms)
        engine.create_function("oldest_running", 0, self._oldest_running)
        engine.create_function("new_number", 0, self.new_number)
        if engine.in_transaction:
            engine.execute("ROLLBACK")
        for table in ("kafka_messages", "kafka_topic_info", "kafka_topic_offset", "kafka_parked"):
            engine.execute(f"DELETE FROM {table}")
        engine.execute("BEGIN")
        self._inside = False
        self._meanwhile: list[OpenTransaction] = []

    def now_ms(self) -> int:
        return START_MS + round(self.scheduler.now_s * 1000)

    def new_number(self) -> int:
        self._last_number = next(self._numbers)
        return self._last_number

    def new_id(self) -> int:
        return next(self._ids)

    def _oldest_running(self) -> int:
        return min((each.number for each in self.open), default=self._last_number + 1)

    def commit(self, transaction: OpenTransaction) -> None:
        """Make a publisher's rows visible."""
        self.open.remove(transaction)
        transaction.state = "committed"
        self._insert(transaction)
        if self._inside:
            self._meanwhile.append(transaction)
        else:
            self._make_durable()

    def _insert(self, transaction: OpenTransaction) -> None:
        sql = "INSERT INTO kafka_messages (id, topic, key, payload, created_at) VALUES (?, ?, ?, ?, 0)"
        self.engine.executemany(sql, transaction.rows)

    def _make_durable(self) -> None:
        self.engine.execute("COMMIT")
        self.engine.execute("BEGIN")

    def execute(self, sql: str, parameters: Sequence[Any]) -> list[Any]:
        """Run a statement, which sees everything that others have committed before."""
        ready = [each for each in self.open if each.state == "ready"] if self._inside else ()
        if ready and self.chance.random() > 0.8:
            self.commit(ready[0])
        return self.engine.execute(sql.replace("%s", "?"), tuple(parameters)).fetchall()

    def execute_alone(self, sql: str, parameters: Sequence[Any]) -> list[Any]:
        """Run a statement as a transaction."""
        found = self.execute(sql, parameters)
        if not sql.startswith(("SELECT", "WITH")):
            self._make_durable()
        return found

    @contextmanager
    def transaction(self, *, durable: bool) -> Iterator[None]:
        self.engine.execute("SAVEPOINT one")
        self._inside = True
        try:
            yield
        except BaseException:
            self.engine.execute("ROLLBACK TO one")
            for transaction in self._meanwhile:
                self._insert(transaction)
            raise
        finally:
            self._inside = False
            self.engine.execute("RELEASE one")
            if durable or self._meanwhile:
                self._make_durable()
            self._meanwhile = []

    def crash(self) -> None:
        """Lose all data that is not durable, every open transaction and every connection."""
        self.engine.execute("ROLLBACK")
        self.engine.execute("BEGIN")
        self.generation += 1
        for transaction in self.open:
            transaction.state = "aborted"
        self.open = []


class Rows(msgspec.Struct):
    """The rows of a statement."""

    rows: list[Any]

    def fetchall(self) -> list[Any]:
        return self.rows


class SimulatedStore(OutboxStore):
    """The connection of one thread, with faults before and after every transaction."""

    dialect = "sqlite"

    def __init__(
        self, database: SimulatedDatabase, settings: OutboxSettings, floors: ScanFloors, process: RelayProcess
    ) -> None:
        self._process = process
        # The base class would format all statements again for each of thousands of connections.
        self._sql, self._floors, self._known_topics = _STATEMENTS, floors, set()
        self._lock_limit_ms, self._hold_parked = settings.lock_limit_ms, True
        self._database = database
        self._generation = database.generation
        self._inside = False

    def _execute(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        if self._inside:
            return Rows(self._database.execute(sql, parameters))
        with self._travels():
            return Rows(self._database.execute_alone(sql, parameters))

    @contextmanager
    def _transaction(self, *, durable: bool) -> Iterator[None]:
        with self._travels():
            self._inside = True
            try:
                with self._database.transaction(durable=durable):
                    yield
            finally:
                self._inside = False

    @contextmanager
    def _travels(self) -> Iterator[None]:
        """Let the request travel, take effect, and its answer travel back; either may be lost."""
        database = self._database
        self._travel()
        if database.chance.random() < database.faults.refused:
            raise Unavailable("the database refuses the connection")
        is_lost = database.chance.random() < database.faults.unanswered
        if is_lost and database.chance.random() < 0.5:
            raise Unavailable("the database has not done it, and does not answer")
        yield
        self._travel()
        if is_lost:
            raise Unavailable("the database has done it, and does not answer")

    def _travel(self) -> None:
        database = self._database
        database.scheduler.sleep(database.chance.random() * database.faults.call_s_max)
        if self._process.isolated_until_s > database.scheduler.now_s:
            raise Unavailable("the database cannot be reached")
        if self._generation != database.generation:
            raise Unavailable("the connection was lost when the database crashed")

    def close(self) -> None:
        """Do nothing: the connection has no resource."""


class Connections:
    """Opens connections for the threads of one process."""

    def __init__(self, database: SimulatedDatabase, settings: OutboxSettings, process: RelayProcess) -> None:
        self._database, self._settings, self._floors = database, settings, ScanFloors()
        self._process = process

    def connect(self) -> SimulatedStore:
        database = self._database
        database.scheduler.sleep(database.chance.random() * database.faults.call_s_max)
        if database.chance.random() < database.faults.refused:
            raise Unavailable("the database refuses the connection")
        self._floors.reset_unless(database.generation)
        return SimulatedStore(database, self._settings, self._floors, self._process)

    def listen(self) -> None:
        """Return None: the relay polls."""


# ---- the log


class SentRecord(msgspec.Struct, frozen=True):
    """A message in a partition."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, str | bytes | None]]


class SimulatedLog:
    """The topic's partitions, with the fence of the run."""

    def __init__(
        self, scheduler: ThreadScheduler, chance: random.Random, faults: Faults, fence: Fence, skew_ms: int
    ) -> None:
        self.scheduler, self.chance, self.faults, self.fence = scheduler, chance, faults, fence
        self.partitions: dict[str, list[list[SentRecord]]] = {}
        self.skew_ms = skew_ms
        #: Called when a process is about to send.
        self.tempt: Callable[[SimulatedProcess], None] = lambda process: None
        #: The epoch of each topic's newest transactional producer, and the process that holds its file lock.
        self.epochs: dict[str, int] = {}
        self.locks: dict[str, SimulatedProcess] = {}

    def of(self, topic: str) -> list[list[SentRecord]]:
        return self.partitions.setdefault(topic, [[] for _ in range(PARTITIONS)])

    def now_ms(self) -> int:
        """Return the time by the broker's clock."""
        return START_MS + round(self.scheduler.now_s * 1000) + self.skew_ms

    def append(self, topic: str, message: port.RelayedMessage) -> None:
        self.of(topic)[_partition(message)].append(SentRecord(message.key, message.value, message.headers))

    def delay_s(self) -> float:
        """Return how long a request travels; a few travel much longer than a lock lasts."""
        is_late = self.chance.random() < self.faults.unanswered
        return self.chance.random() * (self.faults.late_s_max if is_late else self.faults.call_s_max)


def _partition(message: port.RelayedMessage) -> int:
    return crc32(order_key(message) or b"") % PARTITIONS


class SimulatedTarget(port.RelayTarget):
    """The log, as one relay process uses it."""

    def __init__(self, log: SimulatedLog, process: RelayProcess, fence_ms: int) -> None:
        self._log, self._process, self._fence_ms = log, process, fence_ms
        self._channels: dict[str, TimestampChannel | TransactionChannel] = {}

    def _call(self) -> None:
        self._log.scheduler.sleep(self._log.chance.random() * self._log.faults.call_s_max)
        if self._log.chance.random() < self._log.faults.refused:
            raise Unavailable("the broker does not answer")

    def topic(self, topic: str, *, fresh: bool = False) -> port.TargetTopic:
        self._call()
        return port.TargetTopic(topic, "id-1", PARTITIONS, 1_000_000, False, self._log.fence, self._fence_ms)

    def ends(self, topic: port.TargetTopic, *, fresh: bool = False) -> dict[int, int]:
        self._call()
        return {number: len(records) for number, records in enumerate(self._log.of(topic.topic))}

    def channel(self, topic: port.TargetTopic, *, fresh: bool, singly: bool = False) -> port.Channel:
        log, name = self._log, topic.topic
        if topic.fence is Fence.LOCK:
            holder = log.locks.get(name)
            if holder is not None and holder is not self._process and not holder.dead:
                self._call()
                raise Unavailable("another process holds the lock")
            log.locks[name] = self._process
            return LockChannel(log, self._process, topic)
        found = self._channels.get(name)
        if found is None or found.dropped or fresh:
            if topic.fence is Fence.TRANSACTION:
                self._call()
                log.epochs[name] = log.epochs.get(name, 0) + 1
                found = TransactionChannel(log, self._process, topic, log.epochs[name])
            else:
                found = TimestampChannel(log, self._process, topic, singly=singly)
            self._channels[name] = found
        found.singly = singly
        return found

    def scan(
        self, topic: port.TargetTopic, session: port.RelaySession, on_step: Callable[[], None]
    ) -> port.FoundMessages:
        found: set[int] = set()
        for partition, end in self.ends(topic, fresh=True).items():
            for place in range(session.scan_from.get(partition, 0), end):
                if place % 2 == 0:
                    self._call()
                on_step()
                id = session.id_in(self._log.of(topic.topic)[partition][place].headers)
                found |= {id} if id is not None else set()
        return port.FoundMessages(frozenset(found))

    def release(self, topic: str) -> None:
        if self._log.locks.get(topic) is self._process and not self._process.dead:
            del self._log.locks[topic]


class SimulatedChannel:
    """A batch that is being sent. A paused process sends the rest when it continues; a dead one sends nothing more."""

    def __init__(self, log: SimulatedLog, process: RelayProcess, topic: port.TargetTopic) -> None:
        self.log, self.process, self.topic = log, process, topic
        self.dropped = self.singly = False
        self.outcome: port.Outcome | None = None

    def wait(self, timeout_s: float) -> port.Outcome | None:
        deadline_s = self.log.scheduler.now_s + timeout_s
        while self.outcome is None and self.log.scheduler.now_s < deadline_s:
            self.log.scheduler.sleep(STEP_S)
        return self.outcome

    def drop(self) -> None:
        self.dropped = True

    def depart(self, act: Callable[[], None], after_s: float = 0.0) -> None:
        """Call `act` in the process after a delay, unless the channel is dropped before."""

        def go() -> None:
            if self.process.dead or self.dropped:
                return
            if self.process.paused_until_s > self.log.scheduler.now_s:
                self.log.scheduler.call_at(self.process.paused_until_s, go)
            else:
                act()

        self.log.scheduler.call_at(self.log.scheduler.now_s + after_s, go)

    def travel(self, act: Callable[[], None]) -> None:
        """Call `act` at the broker when the request arrives, even if its sender is dead."""
        arrives_s = self.log.scheduler.now_s + self.log.delay_s()
        self.log.scheduler.call_at(max(arrives_s, self.process.isolated_until_s), act)

    def is_lost(self) -> bool:
        return self.log.chance.random() < self.log.faults.unanswered


#: Messages of one partition, with the producer's sequence numbers.
Chain = list[tuple[int, port.RelayedMessage]]


class TimestampChannel(SimulatedChannel):
    """An idempotent producer: messages of a partition arrive once and in order, unless they are too old."""

    def __init__(self, log: SimulatedLog, process: RelayProcess, topic: port.TargetTopic, *, singly: bool) -> None:
        super().__init__(log, process, topic)
        self.singly = singly
        #: The number of messages that the broker has taken from this producer, by partition.
        self._taken: dict[int, int] = {}
        self._numbers: dict[int, int] = {}

    def start(self, messages: Sequence[port.RelayedMessage], *, timestamp_ms: int) -> None:
        self.log.tempt(self.process)
        self.outcome = None
        self._timestamp_ms = timestamp_ms
        self._sent: list[int] = []
        self._refused: list[port.BatchRefused] = []
        self._unknown: port.BatchOutcomeUnknown | None = None
        chains: dict[int, Chain] = {}
        for message in messages:
            partition = _partition(message)
            number = self._numbers.get(partition, 0)
            self._numbers[partition] = number + 1
            chains.setdefault(partition, []).append((number, message))
        self._running = len(chains)
        for partition, chain in chains.items():
            self.depart(partial(self._send_next, partition, chain))

    def _send_next(self, partition: int, chain: Chain) -> None:
        size = 1 if self.singly else self.log.chance.randrange(1, len(chain) + 1)
        self._send(partition, chain[:size], chain[size:])

    def _send(self, partition: int, part: Chain, rest: Chain) -> None:
        """Send one produce request; a lost one is retried unchanged."""
        if self.is_lost():
            self.depart(lambda: self._send(partition, part, rest), RETRY_S)
        else:
            self.travel(lambda: self._arrive(partition, part, rest))

    def _arrive(self, partition: int, part: Chain, rest: Chain) -> None:
        log, taken = self.log, self._taken.get(partition, 0)
        if part[0][0] >= taken:
            if part[0][0] > taken:
                return self._reply(lambda: self._end(port.BatchOutcomeUnknown("out of sequence")))
            if log.now_ms() - self._timestamp_ms > self.topic.fence_ms:
                return self._reply(lambda: self._end(port.BatchOutcomeUnknown("too old", late=True)))
            if log.chance.random() < log.faults.poison:
                return self._reply(lambda: self._refuse(part))
            for _, message in part:
                log.append(self.topic.topic, message)
            self._taken[partition] = part[-1][0] + 1
        if self.is_lost():
            return self.depart(lambda: self._send(partition, part, rest), RETRY_S)
        return self._reply(lambda: self._on_acknowledged(partition, part, rest))

    def _reply(self, act: Callable[[], None]) -> None:
        self.depart(act, self.log.delay_s())

    def _on_acknowledged(self, partition: int, part: Chain, rest: Chain) -> None:
        self._sent += [message.id for _, message in part]
        if rest:
            self._send_next(partition, rest)
        else:
            self._end(None)

    def _refuse(self, part: Chain) -> None:
        if len(part) > 1:
            self._end(port.BatchOutcomeUnknown(REFUSED, suspect=True))
        else:
            self._refused.append(port.BatchRefused(part[0][1].id, REFUSED))
            self._end(None)

    def _end(self, unknown: port.BatchOutcomeUnknown | None) -> None:
        self._unknown = self._unknown or unknown
        self._running -= 1
        if self._running:
            return
        sent = tuple(self._sent)
        if self._unknown is not None:
            self.outcome = msgspec.structs.replace(self._unknown, sent=sent)
        elif self._refused:
            self.outcome = port.BatchPartlySent(sent, tuple(self._refused))
        else:
            self.outcome = port.BatchSent()


class TransactionChannel(SimulatedChannel):
    """A transactional producer: a batch becomes visible at its commit, unless a newer producer has begun."""

    def __init__(self, log: SimulatedLog, process: RelayProcess, topic: port.TargetTopic, epoch: int) -> None:
        super().__init__(log, process, topic)
        self._epoch = epoch

    def start(self, messages: Sequence[port.RelayedMessage], *, timestamp_ms: int) -> None:
        self.log.tempt(self.process)
        self.outcome = None
        self.depart(lambda: self.travel(lambda: self._commit(messages)), self.log.delay_s())

    def _commit(self, messages: Sequence[port.RelayedMessage]) -> None:
        log = self.log
        if log.epochs[self.topic.topic] != self._epoch:
            return self._reply(port.BatchOutcomeUnknown("a newer producer has begun"))
        if log.chance.random() < log.faults.poison:
            refused = port.BatchRefused(log.chance.choice(messages).id, REFUSED)
            return self._reply(port.BatchPartlySent((), (refused,)))
        for message in messages:
            log.append(self.topic.topic, message)
        is_lost = self.is_lost()
        return self._reply(port.BatchOutcomeUnknown("the commit was not answered") if is_lost else port.BatchSent())

    def _reply(self, outcome: port.Outcome) -> None:
        def answer() -> None:
            self.outcome = outcome

        self.depart(answer, self.log.delay_s())


class LockChannel(SimulatedChannel):
    """The embedded log: the process that holds the topic's lock writes a batch at one moment."""

    def start(self, messages: Sequence[port.RelayedMessage], *, timestamp_ms: int) -> None:
        log = self.log
        log.tempt(self.process)
        log.scheduler.sleep(log.delay_s())
        is_lost = self.is_lost()
        if is_lost and log.chance.random() < 0.5:
            self.outcome = port.BatchOutcomeUnknown("nothing was written")
            return
        if log.locks.get(self.topic.topic) is not self.process:
            raise AssertionError("a process writes without the lock")
        for message in messages:
            log.append(self.topic.topic, message)
        log.scheduler.sleep(log.delay_s())
        self.outcome = port.BatchOutcomeUnknown("it was written") if is_lost else port.BatchSent()


# ---- processes


class SimulatedShutdown(RelayShutdown):
    """A stop request whose waits take simulated time."""

    def __init__(self, scheduler: ThreadScheduler) -> None:
        super().__init__()
        self._scheduler = scheduler

    def wait(self, timeout_s: float) -> bool:
        if not self.requested():
            self._scheduler.sleep(timeout_s)
        return self.requested()


class SimulatedWakeup:
    """Wakes the relay's loop at its next poll."""

    nudged = False

    def __init__(self, scheduler: ThreadScheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False

    def set(self, *, nudged: bool = False) -> None:
        self._is_set = True

    def wait(self, timeout_s: float) -> bool:
        if not self._is_set:
            self._scheduler.sleep(timeout_s)
        was_set, self._is_set = self._is_set, False
        return was_set


class SimulatedTopicQueue:
    """The queue between the relay's threads."""

    def __init__(self, scheduler: ThreadScheduler) -> None:
        self._scheduler = scheduler
        self._topics: list[str | None] = []

    def put(self, topic: str | None) -> None:
        self._topics.append(topic)

    def get(self, timeout: float) -> str | None:
        if not self._topics:
            self._scheduler.sleep(min(timeout, 4 * STEP_S))
        if not self._topics:
            raise queue.Empty
        return self._topics.pop(0)


class SeededIds:
    """Makes the ids of locks and sessions from the run's choices."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def new(self) -> bytes:
        return self._chance.randbytes(16)

    def several(self, count: int) -> list[bytes]:
        return [self.new() for _ in range(count)]


class RelayProcess(SimulatedProcess):
    """A process that runs a relay with one worker."""

    def __init__(self, run: RelayRun, name: str) -> None:
        super().__init__(name)
        #: Until then the process's requests to the database fail, and those to the log are delayed.
        self.isolated_until_s = 0.0
        scheduler, settings = run.scheduler, run.settings
        target = SimulatedTarget(run.log, self, settings.fence_ms)
        self.relay = Relay(
            Connections(run.database, settings, self),
            lambda _: target,
            settings,
            ids=SeededIds(run.chance),
            metrics=_METRICS,
        )
        self.relay._shutdown = self.relay._state.shutdown = SimulatedShutdown(scheduler)
        self.relay._wakeup = SimulatedWakeup(scheduler)  # type: ignore[assignment]
        self.relay._topics = SimulatedTopicQueue(scheduler)  # type: ignore[assignment]
        self.relay._uuid = run.chance.randbytes(16)

        def find() -> None:
            self.relay._find_work(None, False)
            self.relay._topics.put(None)

        scheduler.start(self, find)
        scheduler.start(self, lambda: self.relay._worker(0, target))


class Publisher(SimulatedProcess):
    """A process that publishes in transactions, some of which fail or roll back."""

    def __init__(self, run: RelayRun, name: str, count: int) -> None:
        super().__init__(name)
        self._run, self._count = run, count
        run.scheduler.start(self, self._publish)

    def _publish(self) -> None:
        run, chance, database = self._run, self._run.chance, self._run.database
        for number in range(1, self._count + 1):
            run.scheduler.sleep(chance.random() * TROUBLE_S / (self._count + 1))
            messages = [
                (chance.choice(run.topics), chance.choice(KEYS), f"{self.name}-{number}-{part}")
                for part in range(1, chance.choice((1, 1, 2, 3)) + 1)
            ]
            call = run.begin(self.name, messages)
            transaction = OpenTransaction(database.new_number(), [])
            database.open.append(transaction)
            for topic, key, value in messages:
                run.scheduler.sleep(chance.random() * database.faults.call_s_max)
                transaction.rows.append((database.new_id(), topic, key.encode(), value.encode()))
                if transaction.state != "open":
                    break
            run.scheduler.sleep(chance.choice((0.0, 0.3, 1.5)))
            self._end(transaction, call)

    def _end(self, transaction: OpenTransaction, call: int) -> None:
        run, database = self._run, self._run.database
        is_rolled_back = run.chance.random() < database.faults.unanswered
        if transaction.state == "open" and is_rolled_back:
            database.open.remove(transaction)
            transaction.state = "aborted"
        elif transaction.state == "open":
            transaction.state = "ready"  # the commit has been sent
            run.scheduler.sleep(run.chance.random() * database.faults.call_s_max)
            if transaction.state == "ready":
                database.commit(transaction)
        run.scheduler.sleep(run.chance.random() * database.faults.call_s_max)
        is_lost = run.chance.random() < database.faults.unanswered
        if transaction.state == "aborted":
            run.end(self.name, call, "unknown" if is_lost else "fail")
        else:
            run.end(self.name, call, "unknown" if is_lost else "ok")


class RelayRun:
    """One run, determined by the seed, or by choices that are replayed."""

    def __init__(self, seed: int, replayed: Sequence[Any] | None = None, *, fence: Fence | None = None) -> None:
        self.chance = chance = RecordedChoices(seed, replayed)
        self.scheduler = ThreadScheduler()
        faults = Faults(
            refused=chance.choice((0.0, 0.03)),
            unanswered=chance.choice((0.0, 0.1, 0.25)),
            poison=chance.choice((0.0, 0.05)),
            call_s_max=chance.choice((0.01, 0.1)),
            late_s_max=chance.choice((1.5, 5.0)),
        )
        self.settings = OutboxSettings(
            lock_limit_s=LOCK_LIMIT_S, rest_s=0.5, batch_rows=chance.choice((10, 1, 3)), hold_batches_max=3,
            park_after_tries=30_000, poll_s=chance.choice((1.2, 0.4)),
            stop_s=chance.choice((1.0, 0.05)), fence_s=LOCK_LIMIT_S / chance.choice((3, 2)),
        )  # fmt: skip
        chosen = chance.choice(FENCES) if fence is None else fence
        #: The difference between the clocks of database and brokers; it must be below the lock limit minus the fence.
        skew_ms = chance.choice((0, -1000, 200))
        self.topics = ("t1",) if chance.random() > 0.3 else ("t1", "t2")
        self.database = SimulatedDatabase(self.scheduler, chance, faults)
        self.log = SimulatedLog(self.scheduler, chance, faults, chosen, skew_ms)
        self.log.tempt = self.tempt
        self.story: list[str] = [f"{chosen} {faults}"]
        self._lines: list[HistoryLine] = []
        self._calls = itertools.count(1)
        self._names = itertools.count(1)
        self._relays: list[RelayProcess] = []

    def report(self, text: str) -> None:
        self.story.append(f"{self.scheduler.now_s:.3f} {text}")

    def _now_ns(self) -> int:
        return int(self.scheduler.now_s * 1e9) + len(self._lines)

    def begin(self, process: str, messages: Sequence[tuple[str, str, str]]) -> int:
        call = next(self._calls)
        args: Mapping[str, Any] = {"messages": [list(each) for each in messages]}
        self._lines.append(HistoryLine(process, call, "transaction", "invoke", self._now_ns(), dict(args)))
        return call

    def end(self, process: str, call: int, kind: Any) -> None:
        self._lines.append(HistoryLine(process, call, "transaction", kind, self._now_ns(), {}))

    def _start_relay(self) -> None:
        self._relays.append(RelayProcess(self, f"relay-{next(self._names)}"))

    def _trouble(self) -> None:
        """Cause one fault, and schedule the next."""
        self._cause_fault(self._relays.pop(0))
        if (next_s := self.scheduler.now_s + self.chance.random() * 3.0) < TROUBLE_S:
            self.scheduler.call_at(next_s, self._trouble)

    def tempt(self, process: SimulatedProcess) -> None:
        """Cause some faults at the worst moment: while a batch is on its way."""

        def strike() -> None:
            found = next((each for each in self._relays if each is process), None)
            if found is not None and self.scheduler.now_s < TROUBLE_S:
                self._relays.remove(found)
                self._cause_fault(found)

        if self.chance.random() < 0.35:
            self.scheduler.call_at(self.scheduler.now_s + self.chance.random() * 0.3, strike)

    def _cause_fault(self, process: RelayProcess) -> None:
        chance = self.chance
        match chance.choice(("none", "pause", "kill", "crash", "stop", "isolate")):
            case "pause":
                process.paused_until_s = self.scheduler.now_s + chance.random() * 3 * LOCK_LIMIT_S
                self.report(f"{process.name} is paused until {process.paused_until_s:.3f}")
                self._relays.append(process)
            case "kill":
                process.dead = True
                self.report(f"{process.name} is killed")
                self._start_relay()
            case "stop":
                process.relay._request_stop()
                self.report(f"{process.name} is stopped")
                self._start_relay()
            case "crash":
                self.database.crash()
                self.report("the database crashes")
                self._relays.append(process)
            case "isolate":
                process.isolated_until_s = self.scheduler.now_s + chance.random() * LOCK_LIMIT_S / 2
                self.report(f"{process.name} is isolated until {process.isolated_until_s:.3f}")
                self._relays.append(process)
            case _:
                self._relays.append(process)

    def _is_drained(self) -> bool:
        engine = self.database.engine
        count = "SELECT (SELECT count(*) FROM kafka_messages) + (SELECT count(*) FROM kafka_parked)"
        return not self.database.open and engine.execute(count).fetchone()[0] == 0

    def go(self) -> RuleVerdict:
        """Run, and return the checker's verdict."""
        clock = SimpleNamespace(monotonic=lambda: self.scheduler.now_s)
        modules: list[Any] = [relay, topic_relay]
        logger = logging.getLogger("tidebook.outbox")
        was_disabled, time = logger.disabled, modules[0].time
        logger.disabled = True
        for module in modules:
            module.time = clock
        try:
            for _ in range(2):
                self._start_relay()
            for number in (1, 2):
                Publisher(self, f"publisher-{number}", self.chance.choice((2, 4)))
            self.scheduler.call_at(self.chance.random() * 2.0, self._trouble)
            self.scheduler.run(TROUBLE_S)
            calm = Faults()
            self.database.faults = self.log.faults = calm
            self.scheduler.run(TROUBLE_S + 2 * LOCK_LIMIT_S)  # until late requests have arrived
            while not self._is_drained() and self.scheduler.now_s < TROUBLE_S + QUIET_S:
                self.scheduler.run(self.scheduler.now_s + 1.0)
        finally:
            self.scheduler.close()
            logger.disabled = was_disabled
            for module in modules:
                module.time = time
        return check_outbox(pair_lines([*self._lines, *self._dumps()]))

    def _dumps(self) -> Iterator[HistoryLine]:
        for topic in self.topics:
            rows = [
                {"partition": number, "offset": offset, "key": (record.key or b"").decode(),
                 "value": (record.value or b"").decode()}
                for number, records in enumerate(self.log.of(topic)) for offset, record in enumerate(records)
            ]  # fmt: skip
            yield HistoryLine(
                "inspector", next(self._calls), "dump_messages", "ok", self._now_ns(), {"topic": topic}, rows
            )
