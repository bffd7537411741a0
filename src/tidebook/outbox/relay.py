"""The relay: one thread finds topics with waiting messages, worker threads relay one topic each."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from tidebook.core.errors import Fenced, TidebookError, Unavailable
from tidebook.outbox.message import PREFIX
from tidebook.outbox.port import RelayTarget, RelayTargets
from tidebook.outbox.settings import OutboxSettings
from tidebook.outbox.store import OutboxDatabase, OutboxListener, OutboxStore
from tidebook.outbox.topic_relay import RelayState, TopicRelay
from tidebook.runtime.backoff import Backoff
from tidebook.runtime.clock import Ids, RandomIds
from tidebook.runtime.metrics import Metrics

LOGGER = logging.getLogger("tidebook.outbox")

#: The pause before a request to a database that failed is retried.
RETRY_S = 1.0
#: How many times the relay polls, with a growing pause, after a nudge, which may precede the publisher's commit.
NUDGE_POLLS_MAX = 7
NUDGE_PAUSE_S = 0.0025
NUDGE_PAUSE_S_MAX = 0.16
#: For how long publishers are asked to notify; the request is renewed at the same interval.
NOTIFY_S = 60.0
NOTIFY_RENEW_S = 1.0
#: Notifications are no longer requested after all workers were busy for this many rounds.
BUSY_ROUNDS_MAX = 3
#: The interval at which a worker serves its idle producers.
MAINTAIN_S = 1.0
#: How long threads may take to end after `stop_s`: a request to Kafka or the database may be in flight.
JOIN_S = 30.0


#: The wake-ups of this process, referenced weakly: a relay may be dropped. Readers copy the set, which is atomic.
_wakeups: set[weakref.ref[RelayWakeup]] = set()
# A thread that does not exist in the child may hold an event's lock, and the relays run in the parent.
os.register_at_fork(after_in_child=_wakeups.clear)


class RelayWakeup:
    """The event that a sleeping relay waits for; the relay then polls, because a nudge may precede the commit."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.nudged = False
        _wakeups.add(weakref.ref(self, _wakeups.discard))

    def set(self, *, nudged: bool = False) -> None:
        """Wake the relay."""
        self.nudged = self.nudged or nudged
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until woken; return False on timeout."""
        woken = self._event.wait(timeout_s)
        self._event.clear()
        return woken


def nudge() -> None:
    """Wake every relay of this process: rows may be committed soon."""
    for reference in _wakeups.copy():
        if (wakeup := reference()) is not None:
            wakeup.set(nudged=True)


class RoutedTargets:
    """Sends journals' topics to journals and all others to the log; each is opened when it is first needed."""

    def __init__(self, log: Callable[[], RelayTarget], journals: Callable[[], RelayTarget]) -> None:
        self._factories = {False: log, True: journals}
        self._targets: dict[bool, RelayTarget] = {}
        self._opening = threading.Lock()

    def of(self, topic: str) -> RelayTarget:
        is_journal = topic.startswith(PREFIX)
        with self._opening:
            if is_journal not in self._targets:
                self._targets[is_journal] = self._factories[is_journal]()
            return self._targets[is_journal]

    def maintain(self) -> None:
        for target in list(self._targets.values()):
            target.maintain()

    def close(self) -> None:
        for target in self._targets.values():
            target.close()


class Relay:
    """Relays messages until it is stopped. `targets` are made with the outbox's uuid."""

    def __init__(
        self,
        database: OutboxDatabase,
        targets: Callable[[bytes], RelayTargets],
        settings: OutboxSettings | None = None,
        *,
        ids: Ids | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._database = database
        self._make_targets = targets
        self._settings = settings or OutboxSettings()
        self._ids = ids or RandomIds()
        self.metrics = metrics or Metrics()
        self._state = RelayState(self._settings, self._ids, self.metrics)
        self._shutdown = self._state.shutdown
        self._uuid = self._ids.new()
        self._wakeup = RelayWakeup()
        self._nudge_backoff = Backoff(first_s=NUDGE_PAUSE_S, max_s=NUDGE_PAUSE_S_MAX)
        self._topics: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._busy: set[str] = set()
        self._unconfirmed_locks: dict[str, bytes] = {}
        self._sent = 0
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    def stop(self) -> None:
        """Ask the relay to stop: batches in flight are completed, or dropped after `stop_s`. Signal-safe."""
        # A signal handler may have interrupted the thread that holds an event's lock.
        threading.Thread(target=self._request_stop, name="tidebook-outbox-stop", daemon=True).start()

    def _request_stop(self) -> None:
        self._shutdown.request(self._settings.stop_s)
        self._wakeup.set()

    def run(self, *, once: bool = False) -> int:
        """Relay until `stop` or, with `once`, until nothing is left that can be sent now; return how many were sent."""
        store = self._connect()
        if store is None:
            return 0
        try:
            self._state.outbox = store.identity()
            targets = self._make_targets(self._state.outbox)
        except BaseException:
            store.close()
            raise
        workers = [
            threading.Thread(target=self._worker, args=(n, targets), name=f"tidebook-outbox-{n}", daemon=True)
            for n in range(self._settings.threads)
        ]
        listening = threading.Thread(target=self._listen, name="tidebook-outbox-listener", daemon=True)
        for thread in workers:
            thread.start()
        if not once:
            listening.start()
        try:
            self._find_work(store, once)
        finally:
            self._request_stop()
            for _ in workers:
                self._topics.put(None)
            self._join([*workers, *(() if once else (listening,))])
            targets.close()
        if self._failure is not None:
            raise self._failure
        return self._sent

    def _join(self, threads: Sequence[threading.Thread]) -> None:
        """Wait a bounded time for threads that were asked to end: a database may hang without failing."""
        deadline = time.monotonic() + self._settings.stop_s + JOIN_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if left := [thread.name for thread in threads if thread.is_alive()]:
            LOGGER.error(
                "outbox: threads %s did not end in time and are abandoned: their locks expire", ", ".join(left)
            )

    # ---- finding work

    def _find_work(self, store: OutboxStore | None, once: bool) -> None:
        polls = 0
        try:
            while not self._shutdown.requested():
                try:
                    store = store or self._connect()
                    if store is None:
                        break
                    idle = not self._busy  # read first: a worker that ends after the query may have left rows
                    waiting = store.topics_waiting()
                    with self._lock:  # a topic is queued for the workers at most once at a time
                        dispatched = [topic for topic in waiting if topic not in self._busy]
                        self._busy.update(dispatched)
                    for topic in dispatched:
                        self._topics.put(topic)
                except TidebookError as error:
                    if once:
                        raise
                    self._pause_after_failure(store, error)
                    store = None
                    continue
                if once and not dispatched and idle:
                    break
                polls = self._sleep(0 if dispatched else polls)
        finally:
            if store is not None:
                store.close()

    def _sleep(self, polls: int) -> int:
        """Sleep until something is published or a worker is done; after a nudge, poll with short pauses first."""
        if polls == 0:
            self._nudge_backoff.reset()
        if self._wakeup.nudged and polls < NUDGE_POLLS_MAX:
            self._wakeup.wait(self._nudge_backoff.next_s())
            return polls + 1
        self._wakeup.nudged = False
        self._wakeup.wait(self._settings.poll_s)
        return 0

    def _connect(self) -> OutboxStore | None:
        """Return a connection, retrying until it succeeds; None if the relay is asked to stop first."""
        first = True
        while not self._shutdown.requested():
            try:
                return self._database.connect()
            except Unavailable as error:
                if first:
                    LOGGER.warning("outbox: %s", error)
                first = False
                self._shutdown.wait(RETRY_S)
        return None

    def _pause_after_failure(self, store: OutboxStore | None, error: TidebookError) -> None:
        LOGGER.warning("outbox: %s", error)
        self.metrics.count("outbox_database_failures")
        if store is not None:
            store.close()
        self._shutdown.wait(RETRY_S)

    def _listen(self) -> None:
        """Wake the relay on notifications, if the database has them; without them it polls every `poll_s`."""
        while not self._shutdown.requested():
            try:
                listener = self._database.listen()
                if listener is None:
                    return
                try:
                    self._serve_notifications(listener)
                finally:
                    listener.close()
            except TidebookError as error:
                LOGGER.info("outbox: not listening: %s", error)
                self._shutdown.wait(RETRY_S)

    def _serve_notifications(self, listener: OutboxListener) -> None:
        """Ask for notifications only while some worker is idle: publishers do not pay for them under load."""
        busy_rounds = 0
        while not self._shutdown.requested():
            busy_rounds = busy_rounds + 1 if len(self._busy) >= self._settings.threads else 0
            listener.asleep(self._uuid, NOTIFY_S if busy_rounds < BUSY_ROUNDS_MAX else 0)
            if listener.wait(NOTIFY_RENEW_S):
                self._wakeup.set()
        listener.asleep(self._uuid, 0)

    # ---- workers

    def _worker(self, number: int, targets: RelayTargets) -> None:
        owner = f"{socket.gethostname()}:{os.getpid()}:{number}:{self._uuid.hex()[:8]}"
        store: OutboxStore | None = None
        maintain_at = time.monotonic() + MAINTAIN_S
        try:
            while (topic := self._next_topic()) is not None:
                if time.monotonic() >= maintain_at:
                    targets.maintain()
                    maintain_at = time.monotonic() + MAINTAIN_S
                if not topic:
                    continue
                if not self._shutdown.requested():
                    store = store or self._connect()
                    if store is not None:
                        store = self._relay(store, topic, owner, targets)
                with self._lock:
                    self._busy.discard(topic)
                self._wakeup.set()
        except BaseException as error:
            LOGGER.exception("outbox: a relay thread failed")
            self._failure = error
            self._request_stop()
        finally:
            if store is not None:
                store.close()

    def _next_topic(self) -> str | None:
        """Return the next topic; an empty string after a timeout, None at the end."""
        try:
            return self._topics.get(timeout=MAINTAIN_S)
        except queue.Empty:
            return ""

    def _relay(self, store: OutboxStore, topic: str, owner: str, targets: RelayTargets) -> OutboxStore | None:
        """Lock a topic and relay it; return the store to continue with, or None if its connection is broken."""
        lock_id = self._ids.new()
        topic_relay: TopicRelay | None = None
        try:
            lock = store.try_lock(topic, lock_id=lock_id, owner=owner, retake=self._unconfirmed_locks.get(topic))
            if lock is None:
                return store
            self._unconfirmed_locks.pop(topic, None)
            topic_relay = TopicRelay(lock, store, targets, self._state)
            sent = topic_relay.relay()
            with self._lock:
                self._sent += sent
        except Fenced as error:
            LOGGER.warning("outbox: %s", error)
            self.metrics.count("outbox_locks_lost", topic=topic)
        except Unavailable as error:
            if topic_relay is not None:
                self._unconfirmed_locks[topic] = lock_id
            else:  # the lock may have been taken nevertheless; an earlier unconfirmed one is more likely
                self._unconfirmed_locks.setdefault(topic, lock_id)
            self._pause_after_failure(store, error)
            return None
        except TidebookError as error:  # the topic's row cannot be read: continue with the others
            LOGGER.error("outbox: topic %r: %s", topic, error)
            self.metrics.count("outbox_rests", topic=topic)
            self._shutdown.wait(RETRY_S)
        return store
