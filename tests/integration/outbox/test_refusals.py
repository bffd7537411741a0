"""A message that the log refuses has the same effects on the embedded log and on Kafka (rules 33 and 34)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tidebook
from tests.integration.outbox.relaying import Cluster, until
from tidebook.outbox import Message
from tidebook.outbox.outbox import Outbox

LIMIT_BYTES = 20_000
LARGE = b"x" * 50_000


class Site(NamedTuple):
    """An outbox, and a topic with one partition and a message limit of 20,000 bytes."""

    outbox: Outbox
    topic: str
    values: Callable[[], list[bytes]]

    def publish(self, *messages: tuple[bytes | None, bytes]) -> None:
        self.outbox.publish_alone([Message(self.topic, payload, key=key) for key, payload in messages])

    def parked(self) -> list[tuple[str, bytes | None]]:
        return [(each.state, each.key) for each in self.outbox.parked(self.topic)]


OpenSite = Callable[[str], Any]


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> OpenSite:
    """Return a function that opens an outbox with given settings."""

    @contextmanager
    def opened(settings: str = "") -> Iterator[Site]:
        path = tmp_path / "tidebook.toml"
        if request.param == "embedded":
            path.write_text(f"[outbox]\n{settings}")
            with tidebook.open_sync(path) as book:
                yield _embedded(book)
        else:
            cluster: Cluster = request.getfixturevalue("cluster")
            topic = cluster.topic(partitions=1, max_message_bytes=str(LIMIT_BYTES))
            path.write_text(f'[log]\nurl = "kafka://{cluster.bootstrap}"\n[outbox]\n{settings}')
            with tidebook.open_sync(path) as book:
                yield Site(book.outbox, topic, lambda: [each.value or b"" for each in cluster.read(topic)])

    return opened


def _embedded(book: Any) -> Site:
    log, run = book.log, book._portal.run
    run(log.create_topic("orders", 1, limit_bytes=LIMIT_BYTES))

    def values() -> list[bytes]:
        end = run(log.end("orders", 0))
        return [each.value for each in run(log.read("orders", 0, start=0, stop=end)).records] if end else []

    return Site(book.outbox, "orders", values)


def test_later_messages_of_a_refused_key_wait_until_the_refused_one_is_dropped(site: OpenSite) -> None:
    with site("") as at:
        at.publish((b"k", b"1"), (b"k", LARGE), (b"k", b"2"), (b"o", b"3"), (None, LARGE), (None, b"4"), (b"k", b"5"))
        assert at.outbox.relay(once=True) == 3
        assert at.values() == [b"1", b"3", b"4"]
        assert at.parked() == [("parked", b"k"), ("held", b"k"), ("parked", None), ("held", b"k")]
        at.publish((b"k", b"6"), (b"o", b"7"))
        assert at.outbox.relay(once=True) == 1
        at.outbox.parked_drop(at.topic)
        assert at.outbox.relay(once=True) == 3
        assert at.values() == [b"1", b"3", b"4", b"7", b"2", b"5", b"6"]


def test_later_messages_of_a_refused_key_wait_while_it_is_retried(site: OpenSite) -> None:
    with site("park_after_tries = 3\nrest_s = 0.2\npoll_s = 0.05\nparked = 'skip'\n") as at, at.outbox.relaying():
        at.publish((b"k", b"1"), (b"k", LARGE), (b"k", b"2"), (b"o", b"3"))
        until(lambda: at.parked() == [("parked", b"k")], "the message is parked")
        until(lambda: len(at.values()) == 3, "the later messages are sent")
        assert at.values() == [b"1", b"3", b"2"]


def test_under_the_skip_policy_later_messages_pass_after_the_refused_one_is_parked(site: OpenSite) -> None:
    with site("parked = 'skip'\n") as at:
        at.publish((b"k", b"1"), (b"k", LARGE), (b"k", b"2"), (b"o", b"3"))
        assert at.outbox.relay(once=True) == 3
        assert [each for each in at.values() if each != b"3"] == [b"1", b"2"]
        assert at.parked() == [("parked", b"k")]


def test_the_partition_key_decides_which_messages_wait(site: OpenSite) -> None:
    with site("") as at:
        at.outbox.publish_alone(
            [
                Message(at.topic, LARGE, key=b"a", partition_key=b"p"),
                Message(at.topic, b"1", key=b"b", partition_key=b"p"),
                Message(at.topic, b"2", key=b"a", partition_key=b"q"),
            ]
        )
        assert at.outbox.relay(once=True) == 1
        assert at.values() == [b"2"]
        assert at.parked() == [("parked", b"a"), ("held", b"b")]
