"""Find ends of a topic's partitions that cover every record which a leader has appended so far.

The end that a leader reports is its high watermark: records above it are not replicated yet, and become visible later.
A fetch shows whether there are any, since a leader refuses an offset above the end of its own log, and returns nothing
from one that is only above the high watermark.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient, ListOffsetsResultInfo, OffsetSpec  # type: ignore[attr-defined]

from tidebook.core.errors import Unavailable
from tidebook.kafka.errors import OUT_OF_RANGE
from tidebook.outbox.kafka.scan import STEP_S, open_consumer

#: How long the search may take: records above the high watermark wait for a follower, or for its removal from the ISR.
SEARCH_S_MAX = 20.0
#: How long a broker may take to report the ends before it is asked again.
ANSWER_S_MAX = 5.0
#: How many brokers are asked for the ends, at most.
BROKERS_ASKED_MAX = 5
#: How long a leader may take to refuse an offset; doubled when one does not, because it may only be slow.
REFUSAL_S, REFUSAL_S_MAX = 0.3, 3.0
#: How much further above the end the next offset is, if a leader did not refuse one: other producers may be writing.
DISTANCE_GROWTH = 8
STATISTICS_MS = 100
REFRESH_MS = 1_000
UNKNOWN_EPOCH = -1


class ReportedEnd(NamedTuple):
    """The high watermark of a partition, as the leader of this epoch reports it."""

    offset: int
    leader_epoch: int


def newest_ends(answers: Sequence[Mapping[int, ReportedEnd]], asked: int) -> dict[int, ReportedEnd] | None:
    """Return each partition's end by its newest leader; None unless more than half of the brokers asked have answered.

    A leader that is cut off from the other brokers reports an outdated end, but only under its own, older epoch.
    """
    if 2 * len(answers) <= asked:
        return None
    return {p: max((answer[p] for answer in answers), key=lambda end: end.leader_epoch) for p in answers[0]}


class EndSearch:
    """The search for replicated ends: which offsets to request next, and which ends the answers prove."""

    def __init__(self) -> None:
        #: By partition: every record that its leader had appended before the search began is below this visible end.
        self.replicated: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        #: The end of a leader's log was at or below this offset, after the search had begun.
        self._log_ends_max: dict[int, int] = {}
        self._distances: dict[int, int] = {}

    def note_ends(self, ends: Mapping[int, int]) -> None:
        """Take new high watermarks: an end is replicated once it reaches an earlier end of the leader's log."""
        for partition, end in ends.items():
            self._ends[partition] = end
            if end >= self._log_ends_max.get(partition, end + 1):
                self.replicated.setdefault(partition, end)

    def offsets(self) -> dict[int, int]:
        """Return the offset to request of each partition whose replicated end is not found."""
        return {p: end + self._distances.get(p, 1) for p, end in self._ends.items() if p not in self.replicated}

    def note_refusals(self, offsets: Mapping[int, int], refused: set[int]) -> None:
        """Take the answers for these offsets: the leaders of the partitions `refused` have no such offset."""
        for partition, offset in offsets.items():
            if partition in refused:
                self._log_ends_max[partition] = min(offset - 1, self._log_ends_max.get(partition, offset))
                self._distances[partition] = 1
            else:
                self._distances[partition] = self._distances.get(partition, 1) * DISTANCE_GROWTH
        self.note_ends(self._ends)


def replicated_ends(
    client: Mapping[str, Any], brokers: Sequence[str], topic: str, partitions: int, on_step: Callable[[], None]
) -> dict[int, int]:
    """Return replicated ends of all partitions; raise Unavailable if they are not found within `SEARCH_S_MAX`.

    Each of the `brokers`, given by their addresses, is asked by a client that knows no other broker.
    """
    asked = [AdminClient({**client, "bootstrap.servers": broker}) for broker in brokers[:BROKERS_ASKED_MAX]]
    deadline = time.monotonic() + SEARCH_S_MAX
    ends = _newest_ends(asked, topic, partitions, deadline, on_step)
    search = EndSearch()
    refusal_s = REFUSAL_S
    known: dict[int, int] = {}
    settings = {
        "statistics.interval.ms": STATISTICS_MS,
        "stats_cb": lambda text: known.update(_leader_epochs(text, topic)),
        "topic.metadata.refresh.interval.ms": REFRESH_MS,
    }
    # The client learns the leaders while it is at the ends, which no leader refuses.
    positions = [TopicPartition(topic, p, end.offset) for p, end in ends.items()]
    with open_consumer({**client, **settings}, positions, isolation_level="read_uncommitted") as consumer:
        while True:
            search.note_ends({p: end.offset for p, end in ends.items()})
            if len(search.replicated) == partitions:
                return search.replicated
            # A client never returns to an older leader, so an offset is refused by one of this epoch or a newer one.
            offsets = {p: at for p, at in search.offsets().items() if p in known and known[p] >= ends[p].leader_epoch}
            if offsets:
                refused = _refused(consumer, topic, offsets, min(deadline, time.monotonic() + refusal_s), on_step)
                refusal_s = REFUSAL_S if refused else min(2 * refusal_s, REFUSAL_S_MAX)
                search.note_refusals(offsets, refused)
            else:
                consumer.poll(STEP_S)  # serves the statistics
                on_step()
            if time.monotonic() > deadline:
                waiting = ", ".join(f"partition {p}" for p in sorted(search.offsets()))
                raise Unavailable(
                    f"topic {topic!r} has records that are not replicated yet, or its leaders do not answer ({waiting})"
                )
            if offsets:
                ends = _newest_ends(asked, topic, partitions, deadline, on_step)


def _newest_ends(
    asked: Sequence[AdminClient], topic: str, partitions: int, deadline: float, on_step: Callable[[], None]
) -> dict[int, ReportedEnd]:
    """Ask all brokers for the ends until most of them have answered; raise Unavailable at the deadline."""
    requests = {TopicPartition(topic, p): OffsetSpec.latest() for p in range(partitions)}  # type: ignore[no-untyped-call]
    while True:
        calls = [list(admin.list_offsets(requests, request_timeout=ANSWER_S_MAX).items()) for admin in asked]
        running = {future for call in calls for _, future in call}
        while running:
            _, running = wait(running, STEP_S, FIRST_COMPLETED)
            on_step()
            answers = [answer for call in calls if (answer := _answer(call)) is not None]
            if (ends := newest_ends(answers, len(asked))) is not None:
                return ends
            if time.monotonic() > deadline:
                break
        if time.monotonic() > deadline:
            raise Unavailable(f"topic {topic!r}: most of the {len(asked)} brokers asked do not report its ends")
        time.sleep(STEP_S)  # a leader is being elected, or does not know yet what is replicated


def _answer(call: Sequence[tuple[TopicPartition, Future[ListOffsetsResultInfo]]]) -> dict[int, ReportedEnd] | None:
    """Return the ends that one broker has reported; None if some are missing."""
    if not all(future.done() and future.exception() is None for _, future in call):
        return None
    found = {partition.partition: future.result() for partition, future in call}
    return {p: ReportedEnd(each.offset, UNKNOWN_EPOCH if each.leader_epoch is None else each.leader_epoch)
            for p, each in found.items()}  # fmt: skip


def _leader_epochs(statistics: str, topic: str) -> dict[int, int]:
    """Return the epoch of the leader that a client fetches each partition from, by the client's statistics."""
    partitions = json.loads(statistics)["topics"].get(topic, {"partitions": {}})["partitions"].values()
    return {each["partition"]: each["leader_epoch"] for each in partitions if each["leader"] >= 0}


def _refused(
    consumer: Consumer, topic: str, offsets: Mapping[int, int], deadline: float, on_step: Callable[[], None]
) -> set[int]:
    """Request these offsets; return the partitions whose leaders refuse them until the deadline."""
    consumer.assign([TopicPartition(topic, p, offset) for p, offset in offsets.items()])
    waiting, refused = set(offsets), set[int]()
    while waiting and time.monotonic() < deadline:
        on_step()
        message = consumer.poll(STEP_S)
        if message is None:
            continue
        error, partition = message.error(), message.partition()
        if error is not None and error.code() not in OUT_OF_RANGE and error.code() != KafkaError._PARTITION_EOF:
            raise Unavailable(f"topic {topic!r} cannot be read: {error.str()}")
        if partition in waiting and message.offset() == offsets[partition]:  # else it answers an earlier request
            waiting.discard(partition)
            if error is not None and error.code() in OUT_OF_RANGE:
                refused.add(partition)
    return refused
