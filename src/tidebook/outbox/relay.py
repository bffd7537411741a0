"""The relay: one thread looks for topics with work, N threads relay one topic each."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence

from tidebook.core.clock import Ids, RandomIds
from tidebook.core.errors import Fenced, TidebookError, Unavailable
from tidebook.core.metrics import Metrics
from tidebook.log.relay_port import RelayTarget
from tidebook.outbox.hold import Held
from tidebook.outbox.settings import OutboxSettings
from tidebook.outbox.stop import Stop
from tidebook.outbox.wake import Wake
from tidebook.sql.port.outbox import Listener, OutboxDatabase, OutboxStore

LOGGER = logging.getLogger("tidebook.outbox")

#: How long a relay waits before it asks a database again that did not answer.
AGAIN_S = 1.0
#: How often it looks after a nudge, which may come before the commit that it tells of.
SOON_S = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
#: How long publishers are asked to call, and how often that is renewed.
ASLEEP_S = 60.0
LISTEN_S = 1.0
BUSY_LOOKS = 3
#: How often a worker looks after its producers.
TEND_S = 1.0
#: What threads may take to end past `stop_s`: a request to Kafka or the database may be under way.
JOIN_S = 30.0


class Relay:
    """Relays until it is asked to stop. `target` makes the log's side, given the outbox's uuid."""

    def __init__(
        self,
        database: OutboxDatabase,
        target: Callable[[bytes], RelayTarget],
        settings: OutboxSettings | None = None,
        *,
        ids: Ids | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._database = database
        self._make_target = target
        self._settings = settings or OutboxSettings()
        self._ids = ids or RandomIds()
        self.metrics = metrics or Metrics()
        self._uuid = self._ids.new()
        self._stop = Stop()
        self._wake = Wake()
        self._work: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._busy: set[str] = set()
        self._lost: dict[str, bytes] = {}
        self._suspects: set[str] = set()
        self._said: dict[str, str] = {}
        self._sent = 0
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    def stop(self) -> None:
        """Ask it to end: the batches in hand are finished, or let go of. Safe in a signal handler."""
        # The handler may have interrupted the very thread that holds an event's lock.
        threading.Thread(target=self._ask, name="tidebook-outbox-stop", daemon=True).start()

    def _ask(self) -> None:
        self._stop.ask(self._settings.stop_s)
        self._wake.set()

    def run(self, *, once: bool = False) -> int:
        """Relay until `stop`, or, `once`, until nothing is left that can be sent now; how many messages went."""
        store = self._connect()
        if store is None:
            return 0
        try:
            outbox = store.identity()
            target = self._make_target(outbox)
        except BaseException:
            store.close()
            raise
        workers = [
            threading.Thread(target=self._worker, args=(n, outbox, target), name=f"tidebook-outbox-{n}", daemon=True)
            for n in range(self._settings.threads)
        ]
        listening = threading.Thread(target=self._listen, name="tidebook-outbox-listener", daemon=True)
        for thread in workers:
            thread.start()
        if not once:
            listening.start()
        try:
            self._watch(store, once)
        finally:
            self._ask()
            for _ in workers:
                self._work.put(None)
            self._join([*workers, *(() if once else (listening,))])
            target.close()
        if self._failure is not None:
            raise self._failure
        return self._sent

    def _join(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for threads that were asked to end, but not for ever: a database may not answer and not fail."""
        by = time.monotonic() + self._settings.stop_s + JOIN_S
        for thread in threads:
            thread.join(max(0.0, by - time.monotonic()))
        if left := [thread.name for thread in threads if thread.is_alive()]:
            LOGGER.error("outbox: %s did not end in time and are left behind: their locks run out", ", ".join(left))

    # ---- looking for work

    def _watch(self, store: OutboxStore | None, once: bool) -> None:
        looks = 0
        try:
            while not self._stop.asked():
                try:
                    store = store or self._connect()
                    if store is None:
                        break
                    idle = not self._busy  # before the look: who is done only after it may have left rows
                    offered = self._offer(store.topics_waiting())
                except TidebookError as error:
                    if once:
                        raise
                    self._again(store, error)
                    store = None
                    continue
                if once and not offered and idle:
                    break
                looks = self._sleep(0 if offered else looks)
        finally:
            if store is not None:
                store.close()

    def _offer(self, topics: list[str]) -> int:
        """Give topics to the workers, each to one at a time."""
        with self._lock:
            fresh = [topic for topic in topics if topic not in self._busy]
            self._busy.update(fresh)
        for topic in fresh:
            self._work.put(topic)
        return len(fresh)

    def _sleep(self, looks: int) -> int:
        """Sleep until something is published or done; after a nudge, look several times in short order."""
        if self._wake.nudged and looks < len(SOON_S):
            self._wake.wait(SOON_S[looks])
            return looks + 1
        self._wake.nudged = False
        self._wake.wait(self._settings.poll_s)
        return 0

    def _connect(self) -> OutboxStore | None:
        """A connection, however long it takes; None if the relay is asked to stop first."""
        first = True
        while not self._stop.asked():
            try:
                return self._database.connect()
            except Unavailable as error:
                if first:
                    LOGGER.warning("outbox: %s", error)
                first = False
                self._stop.wait(AGAIN_S)
        return None

    def _again(self, store: OutboxStore | None, error: TidebookError) -> None:
        LOGGER.warning("outbox: %s", error)
        self.metrics.count("outbox_database_failures")
        if store is not None:
            store.close()
        self._stop.wait(AGAIN_S)

    def _listen(self) -> None:
        """Be called by the database where it can call; else the relay looks every `poll_s`."""
        while not self._stop.asked():
            try:
                listener = self._database.listen()
                if listener is None:
                    return
                try:
                    self._answer(listener)
                finally:
                    listener.close()
            except TidebookError as error:
                LOGGER.info("outbox: not listening: %s", error)
                self._stop.wait(AGAIN_S)

    def _answer(self, listener: Listener) -> None:
        """Publishers call only while a worker is free now and then: under load nobody pays for calls."""
        busy_looks = 0
        while not self._stop.asked():
            busy_looks = busy_looks + 1 if len(self._busy) >= self._settings.threads else 0
            listener.asleep(self._uuid, ASLEEP_S if busy_looks < BUSY_LOOKS else 0)
            if listener.wait(LISTEN_S):
                self._wake.set()
        listener.asleep(self._uuid, 0)

    # ---- working

    def _worker(self, number: int, outbox: bytes, target: RelayTarget) -> None:
        owner = f"{socket.gethostname()}:{os.getpid()}:{number}:{self._uuid.hex()[:8]}"
        store: OutboxStore | None = None
        tend_at = time.monotonic() + TEND_S
        try:
            while (topic := self._next()) is not None:
                if time.monotonic() >= tend_at:
                    target.tend()
                    tend_at = time.monotonic() + TEND_S
                if not topic:
                    continue
                if not self._stop.asked():
                    store = store or self._connect()
                    if store is not None:
                        store = self._relay(store, topic, owner, outbox, target)
                with self._lock:
                    self._busy.discard(topic)
                self._wake.set()
        except BaseException as error:
            LOGGER.exception("outbox: a relay thread ended")
            self._failure = error
            self._ask()
        finally:
            if store is not None:
                store.close()

    def _next(self) -> str | None:
        """A topic to relay; an empty one where there is none for a while; None at the end."""
        try:
            return self._work.get(timeout=TEND_S)
        except queue.Empty:
            return ""

    def _relay(
        self, store: OutboxStore, topic: str, owner: str, outbox: bytes, target: RelayTarget
    ) -> OutboxStore | None:
        """Hold a topic once; the store to go on with, or None where its connection is broken."""
        uuid = self._ids.new()
        held: Held | None = None
        try:
            hold = store.try_lock(topic, hold=uuid, owner=owner, again=self._lost.get(topic))
            if hold is None:
                return store
            self._lost.pop(topic, None)
            held = Held(
                hold,
                store,
                target,
                self._settings,
                outbox=outbox,
                ids=self._ids,
                metrics=self.metrics,
                stop=self._stop,
                suspects=self._suspects,
                said=self._said,
            )
            sent = held.relay()
            with self._lock:
                self._sent += sent
        except Fenced as error:
            LOGGER.warning("outbox: %s", error)
            self.metrics.count("outbox_locks_lost", topic=topic)
        except Unavailable as error:
            if held is not None:
                self._lost[topic] = uuid
            else:  # the lock may have been taken nonetheless; one that was lost sight of before is the likelier
                self._lost.setdefault(topic, uuid)
            self._again(store, error)
            return None
        except TidebookError as error:  # its row cannot be read: the others go on
            LOGGER.error("outbox: topic %r: %s", topic, error)
            self.metrics.count("outbox_rests", topic=topic)
            self._stop.wait(AGAIN_S)
        return store
