"""A topic's notice has its cause as a field, so its handling never depends on its text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tidebook.outbox.fence import Fence
from tidebook.outbox.port import Notice, NoticeCause, TargetTopic
from tidebook.outbox.settings import OutboxSettings
from tidebook.outbox.sqlite import SqliteOutboxDatabase, SqliteOutboxStore
from tidebook.outbox.topic_relay import RelayState, TopicRelay
from tidebook.runtime.clock import RandomIds

TOPIC = "orders"


class Target:
    """A target without messages, whose topic has or lacks a fence."""

    def __init__(self, weak: str | None) -> None:
        self._weak = weak

    def of(self, topic: str) -> Any:
        return self

    def topic(self, topic: str, *, fresh: bool = False) -> TargetTopic:
        return TargetTopic(
            topic, "uuid", 1, 1_000_000, False, Fence.NONE if self._weak else Fence.TIMESTAMP, 1_000, self._weak
        )

    def ends(self, topic: TargetTopic, *, fresh: bool = False) -> dict[int, int]:
        return {0: 0}

    def channel(self, *_: object, **__: object) -> None:
        return None

    def release(self, topic: str) -> None:
        return None


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteOutboxStore]:
    store = SqliteOutboxDatabase(tmp_path / "outbox.db", OutboxSettings()).connect()
    store.create_tables()
    yield store
    store.close()


@pytest.fixture
def relay(store: SqliteOutboxStore) -> Callable[[str | None], None]:
    def run(weak: str | None) -> None:
        lock = store.try_lock(TOPIC, lock_id=RandomIds().new(), owner="test")
        assert lock is not None
        target: Any = Target(weak)
        TopicRelay(lock, store, target, RelayState(OutboxSettings())).relay()

    return run


def stored(store: SqliteOutboxStore) -> Notice | None:
    [status] = store.status(count_max=1)
    if status.notice_cause is None or status.notice is None:
        return None
    return Notice(status.notice_cause, status.notice)


def test_a_missing_fence_is_stored_with_its_cause_and_cleared_by_a_fence(
    store: SqliteOutboxStore, relay: Callable[[str | None], None]
) -> None:
    relay("no fence")
    notice = stored(store)
    assert notice is not None
    assert notice.cause is NoticeCause.WEAK
    assert "no fence" in notice.text
    relay(None)
    assert stored(store) is None


@pytest.mark.parametrize("text", ["in other words", ""])
def test_a_notice_of_a_missing_fence_is_cleared_whatever_its_text(
    store: SqliteOutboxStore, relay: Callable[[str | None], None], text: str
) -> None:
    relay(None)
    store.notice(TOPIC, Notice(NoticeCause.WEAK, text))
    relay(None)
    assert stored(store) is None


def test_a_notice_of_a_lost_session_is_kept_whatever_its_text(
    store: SqliteOutboxStore, relay: Callable[[str | None], None]
) -> None:
    relay(None)
    lost = Notice(NoticeCause.LOST, "messages may be sent twice after a pause: so begins the other notice")
    store.notice(TOPIC, lost)
    relay(None)
    assert stored(store) == lost
