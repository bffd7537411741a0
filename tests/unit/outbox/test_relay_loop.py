"""The relay's loop: it polls again, pauses after errors, retakes its lock and abandons a hanging thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tidebook.core.errors import Corrupt, TidebookError, Unavailable
from tidebook.outbox.port import TopicLock
from tidebook.outbox.relay import Relay
from tidebook.outbox.settings import OutboxSettings


class Store:
    """A store that returns the topics of `topics`, and raises `locking` when one is locked."""

    def __init__(self, topics: Callable[[], list[str]], locking: TidebookError | None = None) -> None:
        self.topics_waiting = topics
        self.locking = locking
        self.locks: list[tuple[bytes, bytes | None]] = []

    def connect(self) -> Any:
        return self

    def listen(self) -> None:
        return None

    def identity(self) -> bytes:
        return bytes(16)

    def try_lock(self, topic: str, *, lock_id: bytes, owner: str, retake: bytes | None = None) -> TopicLock | None:
        self.locks.append((lock_id, retake))
        if self.locking is not None:
            raise self.locking
        return None

    def close(self) -> None:
        pass


class Target:
    def maintain(self) -> None:
        pass

    def close(self) -> None:
        pass


def relay_of(store: Store) -> Relay:
    return Relay(store, lambda _: Target(), OutboxSettings(poll_s=0.01, stop_s=1))  # type: ignore[arg-type, return-value]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_run_once_polls_again_if_a_worker_ended_during_the_last_poll() -> None:
    """The rows that the worker left were not visible when that poll began."""
    polls: list[None] = []
    second = threading.Event()

    def topics() -> list[str]:
        polls.append(None)
        if len(polls) == 2:
            second.set()
            until(lambda: not relay._busy)
        return ["orders"] if len(polls) in {1, 3} else []

    class Slow(Store):
        def try_lock(self, topic: str, **options: Any) -> TopicLock | None:
            second.wait(10)
            return super().try_lock(topic, **options)

    store = Slow(topics)
    relay = relay_of(store)
    relay.run(once=True)
    assert len(store.locks) == 2


@pytest.mark.parametrize("error", [Corrupt("its row is damaged"), Unavailable("it does not answer")])
def test_a_topic_that_cannot_be_locked_is_not_tried_without_pause(error: TidebookError) -> None:
    store = Store(lambda: ["orders"], error)
    relay = relay_of(store)
    running = threading.Thread(target=relay.run, daemon=True)
    running.start()
    until(lambda: store.locks)
    time.sleep(0.3)  # long enough for hundreds of attempts without a pause
    relay.stop()
    running.join(10)
    assert not running.is_alive()
    assert len(store.locks) == 1


def test_a_lock_with_an_unknown_outcome_is_taken_again_by_the_same_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidebook.outbox.relay.RETRY_S", 0.01)
    store = Store(lambda: ["orders"], Unavailable("the connection broke"))
    relay = relay_of(store)
    running = threading.Thread(target=relay.run, daemon=True)
    running.start()
    until(lambda: len(store.locks) >= 2)
    relay.stop()
    running.join(10)
    assert store.locks[1][1] == store.locks[0][0]


def test_a_thread_that_does_not_end_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidebook.outbox.relay.JOIN_S", 0.1)
    go = threading.Event()

    class Frozen(Store):
        def try_lock(self, topic: str, **_: Any) -> TopicLock | None:
            go.wait(60)
            return None

    relay = Relay(
        Frozen(lambda: ["orders"]),
        lambda _: Target(),  # type: ignore[arg-type, return-value]
        OutboxSettings(poll_s=0.01, stop_s=0.1),
    )
    running = threading.Thread(target=relay.run, daemon=True)
    running.start()
    until(lambda: relay._busy)
    relay.stop()
    running.join(10)
    assert not running.is_alive()
    go.set()
