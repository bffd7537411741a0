"""The real job writes ticks, so that followers of a tag see its events, until nothing more is appended."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.pipeline.conftest import SERVERS, opened
from tidebook.core.event import Event
from tidebook.replication import ticks
from tidebook.runtime.blocking_portal import BlockingPortal
from tidebook.tags.event import TaggedEvent
from tidebook.wiring.book import Book
from tidebook.wiring.replication import is_embedded

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidebook.pipeline.jobs.replicate import Replication

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

CASE_TIMEOUT_S = 120


@contextmanager
def running(job: Replication) -> Iterator[None]:
    thread = threading.Thread(target=job.run)
    thread.start()
    try:
        yield
    finally:
        job.stop()
        thread.join(CASE_TIMEOUT_S)
    assert not thread.is_alive()


def test_a_follower_sees_what_a_running_job_replicates_and_idle_topics_are_not_ticked_for_ever(
    spark: SparkSession,
    book: Book,
    portal: BlockingPortal,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
    long_form: bool,
) -> None:
    from tidebook.pipeline.jobs.replicate import Replication

    tag = f"tag-{topic}"
    portal.run(book.journal(topic).append("a", [Event(0, tags={tag})]))
    with running(Replication(spark, book, portal, topics=[topic])):
        stream = book.tags.read(tag, follow=True, topics=[topic])
        assert portal.run(_next(stream)).payload == 0
        for n in range(1, 4):
            # Every other partition is idle: only ticks advance their log time.
            portal.run(book.journal(topic).append(f"j-{n}", [Event(n, tags={tag})]))
            assert portal.run(_next(stream)).payload == n
        portal.run(stream.aclose())  # type: ignore[attr-defined]
        monkeypatch.setattr(ticks, "FOLLOWED_FOR_S", 1.0)
        # The job ticks in the same way on either store.
        resting = _rests(book, portal, topic) if long_form or is_embedded(book.settings) else True
    assert resting, "ticks continued although nothing was appended after them"


@pytest.mark.parametrize("kind", ["embedded", SERVERS])
def test_an_event_is_shown_without_waiting_for_another_micro_batch(
    spark: SparkSession, portal: BlockingPortal, topic: str, tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    from tidebook.pipeline.jobs.replicate import Replication

    toml = request.getfixturevalue("servers_toml") if kind == "servers" else tmp_path / "tidebook.toml"
    with toml.open("a") as settings:  # the first micro-batch begins at once, the second after the test
        settings.write("[pipeline]\ntrigger_s = 3600\nlease_s = 0\n")
    tag = f"tag-{topic}"
    with opened(portal, toml) as book:
        portal.run(book.journal(topic).append("a", [Event(0, tags={tag})]))
        stream = book.tags.read(tag, follow=True, topics=[topic])
        with running(Replication(spark, book, portal, topics=[topic])):
            assert portal.run(asyncio.wait_for(_next(stream), CASE_TIMEOUT_S)).payload == 0
            portal.run(stream.aclose())  # type: ignore[attr-defined]


async def _next(stream: AsyncIterator[TaggedEvent]) -> TaggedEvent:
    return await anext(stream)


def _rests(book: Book, portal: BlockingPortal, topic: str) -> bool:
    """Return whether the log stops growing."""
    deadline = time.monotonic() + CASE_TIMEOUT_S
    before, since = -1, time.monotonic()
    while time.monotonic() < deadline:
        now = portal.run(_records(book, topic))
        if now != before:
            before, since = now, time.monotonic()
        elif time.monotonic() - since > 7:  # longer than an idle job waits between two ticks
            return True
        threading.Event().wait(0.2)
    return False


async def _records(book: Book, topic: str) -> int:
    config = await book.store.topic_config(topic)
    assert config is not None
    return sum([await book.log.end(topic, number) for number in range(config.partitions)])
