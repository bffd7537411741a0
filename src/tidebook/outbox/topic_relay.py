"""Relay one topic while its lock is held: resolve the session left open by the last owner, then send batches."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from tidebook.core.errors import Fenced, TidebookError
from tidebook.outbox import batch_selection, port
from tidebook.outbox.fence import Fence
from tidebook.outbox.settings import OutboxSettings
from tidebook.outbox.store import OutboxStore
from tidebook.runtime import tracing
from tidebook.runtime.clock import Ids, RandomIds
from tidebook.runtime.metrics import Metrics

LOGGER = logging.getLogger("tidebook.outbox")

#: How many times a relay renews its lock within `lock_limit_s`.
HEARTBEATS_PER_LOCK_LIMIT = 6
#: The share of `fence_ms` within which a batch must be acknowledged.
FENCE_USABLE_SHARE = 0.9
#: The longest wait for an outcome between two checks of the heartbeat and of the shutdown.
STEP_S_MAX = 0.5
#: How many batches are sent before the end offsets are fetched again.
BATCHES_PER_ENDS = 20


class _Stopped(Exception):
    """The relay was asked to stop during a scan."""


class RelayShutdown:
    """The stop request, shared by the threads of a relay."""

    def __init__(self) -> None:
        self._requested = threading.Event()
        self._deadline = float("inf")

    def request(self, within_s: float) -> None:
        """Request the stop; later requests do not move the deadline."""
        if not self._requested.is_set():
            self._deadline = time.monotonic() + within_s
            self._requested.set()

    def requested(self) -> bool:
        """Return whether the relay should start nothing new."""
        return self._requested.is_set()

    def overdue(self) -> bool:
        """Return whether the deadline has passed and the batch in flight should be dropped."""
        return time.monotonic() > self._deadline

    def wait(self, timeout_s: float) -> bool:
        """Pause for `timeout_s`; return True as soon as the stop is requested."""
        return self._requested.wait(timeout_s)


@dataclass
class RelayState:
    """The state that the threads of a relay share."""

    settings: OutboxSettings
    ids: Ids = field(default_factory=RandomIds)
    metrics: Metrics = field(default_factory=Metrics)
    shutdown: RelayShutdown = field(default_factory=RelayShutdown)
    #: The outbox's uuid.
    outbox: bytes = bytes(16)
    #: Topics whose messages are sent one by one, until the one that Kafka refused is found.
    suspect_topics: set[str] = field(default_factory=set)
    #: The last notices that were logged, by topic.
    reported_notices: dict[str, port.Notice] = field(default_factory=dict)


class TopicRelay:
    """Relays one topic for as long as this thread holds its lock."""

    def __init__(self, lock: port.TopicLock, store: OutboxStore, targets: port.RelayTargets, state: RelayState) -> None:
        self._lock = lock
        self._store = store
        self._targets = targets
        self._state = state
        settings = self._settings = state.settings
        self._metrics = state.metrics
        self._shutdown = state.shutdown
        self._heartbeat_s = settings.lock_limit_s / HEARTBEATS_PER_LOCK_LIMIT
        self._heartbeat_at = time.monotonic() + self._heartbeat_s
        self._sent = 0
        #: Another relay may have fenced the channel that this thread had.
        self._needs_fresh_channel = lock.previous_owner != lock.owner or lock.open_session is not None

    def relay(self) -> int:
        """Send the waiting messages, release the lock, and return how many messages were sent.

        Raise Fenced if the lock was lost, and Unavailable if the database does not answer.
        """
        name, open_session = self._lock.topic, self._lock.open_session
        with ExitStack() as releases:
            try:
                self._target: port.RelayTarget = self._targets.of(name)
                releases.callback(self._target.release, name)
                topic = self._target.topic(name, fresh=open_session is not None)
                self._metrics.gauge("outbox_exactly_once", 0 if topic.weak else 1, topic=name)
                if topic.weak is not None:
                    text = f"messages may be sent twice after a pause: {topic.weak}"
                    self._report_notice(port.Notice(port.NoticeCause.WEAK, text))
                if topic.fence is Fence.LOCK:
                    self._target.channel(topic, fresh=True)  # acquires the lock before the scan
                if open_session is None or self._resolve_session(topic, open_session):
                    self._clear_weak_notice(topic)
                    self._relay_batches(topic)
            except _Stopped:
                self._store.unlock(self._lock)
            except Fenced:
                raise
            except TidebookError as error:
                # An error of one topic must not stop the others. If the database failed, this raises again.
                self._rest(str(error))
        return self._sent

    # ---- the session left open by the last owner

    def _resolve_session(self, topic: port.TargetTopic, session: port.RelaySession) -> bool:
        """Find an open session's messages in the log and close it; return False if they could still arrive."""
        self._metrics.count("outbox_sessions_open", topic=topic.topic)
        if session.fence is Fence.TRANSACTION:
            fenced = msgspec.structs.replace(topic, fence=Fence.TRANSACTION)
            self._target.channel(fenced, fresh=True)
            self._needs_fresh_channel = topic.fence is not Fence.TRANSACTION
        if session.fence.may_arrive_late and session.age_ms < self._settings.lock_limit_ms:
            remaining_ms = self._settings.lock_limit_ms - session.age_ms
            reason = "a session was left open: the log is scanned once its messages can no longer arrive"
            self._store.rest(self._lock, reason=reason, rest_ms=remaining_ms, failed=False)
            return False
        if session.fence is Fence.APPEND_ID:
            self._target.scan(topic, session, self._on_scan_step)
            return self._resend(topic, session)
        if session.topic_uuid in {None, topic.uuid}:
            found = self._target.scan(topic, session, self._on_scan_step)
        else:
            was = f"its id was {session.topic_uuid}, and is {topic.uuid}"
            found = port.FoundMessages(frozenset(), f"the topic was re-created ({was})")
        ids, lost = found.ids, found.lost
        if topic.needs_key and len(ids) < len(session.ids):
            ids, lost = self._find_compacted(topic, session, found)
        self._metrics.count("outbox_found", len(ids), topic=topic.topic)
        if lost is not None:
            text = f"{len(session.ids) - len(ids)} messages may be sent twice: {lost}"
            self._report_notice(port.Notice(port.NoticeCause.LOST, text))
        self._store.finish(self._lock, sorted(ids), unlock=False)
        return True

    def _find_compacted(
        self, topic: port.TargetTopic, session: port.RelaySession, found: port.FoundMessages
    ) -> tuple[frozenset[int], str | None]:
        """Return the session's messages that are or were in a compacted topic, and why others may have been."""
        ids = found.ids
        if len(session.scan_from) == topic.partitions:  # no partition was added: each key is still in one
            ids |= batch_selection.compacted_away(self._store.open_rows(self._lock, session), ids)
        if found.lost is None and found.gaps and len(ids) < len(session.ids):
            return ids, "the topic is compacted, and they may have been there"
        return ids, found.lost if len(ids) < len(session.ids) else None

    def _resend(self, topic: port.TargetTopic, session: port.RelaySession) -> bool:
        """Send the session's remaining rows again under their append ids.

        All of them are sent: a row that was left out would no longer belong to a session, and be sent as a new one.
        """
        rows = self._store.open_rows(self._lock, session)
        batch = port.MessageBatch(session.uuid, rows, 0, more=True)
        if rows:
            outcome = self._send(topic, batch)
            if not isinstance(outcome, port.BatchSent):
                return self._handle_failure(topic, batch, outcome)
            self._count_sent(topic, batch)
        self._store.finish(self._lock, [row.id for row in rows], unlock=False)
        return True

    def _on_scan_step(self) -> None:
        if self._shutdown.requested() and self._shutdown.overdue():
            raise _Stopped
        self._heartbeat()

    # ---- batches

    def _relay_batches(self, topic: port.TargetTopic) -> None:
        settings = self._settings
        self._target.channel(topic, fresh=self._needs_fresh_channel)
        sent: list[int] = []
        limit = port.BatchLimit(settings.batch_rows, settings.batch_bytes)
        for number in range(1, settings.hold_batches_max + 1):
            # All messages sent under this lock are at or after these offsets: fetching them again only shortens a scan.
            needs_ends = number % BATCHES_PER_ENDS == 1 or topic.fence is Fence.APPEND_ID
            ends = self._target.ends(topic, fresh=number > 1) if needs_ends else None
            session = port.NewSession(self._state.ids.new(), topic.fence, topic.uuid, ends)
            batch = self._store.begin(
                self._lock,
                session,
                lambda rows, held: batch_selection.select_batch(rows, held, topic, settings),
                limit,
                sent,
            )
            self._heartbeat_at = time.monotonic() + self._heartbeat_s
            sent = []
            if batch.parked_count:
                LOGGER.warning("outbox: %s messages of topic %r were parked", batch.parked_count, topic.topic)
                self._metrics.count("outbox_messages_parked", batch.parked_count, topic=topic.topic)
            if not batch.messages:
                if batch.more or batch.parked_count:
                    continue
                break
            outcome = self._send(topic, batch)
            if not isinstance(outcome, port.BatchSent):
                if not self._handle_failure(topic, batch, outcome):
                    return
                continue
            self._count_sent(topic, batch)
            sent = [row.id for row in batch.messages]
            if not batch.more or self._shutdown.requested() or number == settings.hold_batches_max:
                self._store.finish(self._lock, sent, unlock=True)
                return
        self._store.unlock(self._lock)

    def _send(self, topic: port.TargetTopic, batch: port.MessageBatch) -> port.Outcome:
        channel = self._target.channel(topic, fresh=False, singly=topic.topic in self._state.suspect_topics)
        started = time.monotonic()
        relayed = batch_selection.to_relayed(batch.messages, session=batch.session, outbox=self._state.outbox)
        carried = (value for each in relayed for name, value in each.headers if name == tracing.KEY)
        span = tracing.begin("outbox.relay", carried=carried, topic=topic.topic, messages=len(relayed))
        try:
            channel.start(relayed, timestamp_ms=batch.opened_ms)
            outcome = self._await_outcome(channel, started + self._settings.fence_ms / 1000 * FENCE_USABLE_SHARE)
        except BaseException as error:
            if span is not None:
                span.end(error)
            channel.drop()
            raise
        if span is not None:
            span.end(None if isinstance(outcome, port.BatchSent) else outcome)
        if not isinstance(outcome, port.BatchSent):
            channel.drop()
        self._metrics.time("outbox_send", time.monotonic() - started)
        return outcome

    def _await_outcome(self, channel: port.Channel, deadline: float) -> port.Outcome:
        step_s = min(STEP_S_MAX, self._heartbeat_s)
        while (outcome := channel.wait(step_s)) is None:
            self._heartbeat()
            if time.monotonic() > deadline:
                return port.BatchOutcomeUnknown("Kafka did not acknowledge the batch in time")
            if self._shutdown.overdue():
                return port.BatchOutcomeUnknown("the relay was stopped before Kafka had acknowledged the batch")
        return outcome

    def _handle_failure(
        self,
        topic: port.TargetTopic,
        batch: port.MessageBatch,
        outcome: port.BatchPartlySent | port.BatchOutcomeUnknown,
    ) -> bool:
        """Handle a batch that was not sent completely; return False if the lock was released, True to continue."""
        match outcome:
            case port.BatchPartlySent(sent=sent, refused=refused):
                if refused:  # before the session is closed: a doubtful message must not be sent as a new one
                    self._park_refused(topic, batch, refused)
                self._store.finish(self._lock, sorted(sent), unlock=False)
                self._count_sent(topic, batch, len(sent))
                return True
            case port.BatchOutcomeUnknown():
                if outcome.suspect:
                    self._state.suspect_topics.add(topic.topic)
                if outcome.sent:
                    self._store.delete_sent(self._lock, sorted(outcome.sent))
                    self._count_sent(topic, batch, len(outcome.sent))
                if self._shutdown.requested():
                    self._store.unlock(self._lock)
                else:
                    reason = outcome.reason
                    if outcome.late:
                        reason += f": the batch was over {topic.fence_ms:,} ms old when it reached the broker; if this "
                        reason += "continues, the clocks of database and brokers differ by more than that"
                    rest_ms = 0 if outcome.late or outcome.suspect else round(self._settings.rest_s * 1000)
                    if topic.fence.may_arrive_late:  # no relay may scan before
                        rest_ms = max(rest_ms, self._settings.lock_limit_ms)
                    self._rest(reason, rest_ms)
                return False
            case _:
                assert_never(outcome)

    def _park_refused(
        self, topic: port.TargetTopic, batch: port.MessageBatch, refused: Sequence[port.BatchRefused]
    ) -> None:
        rows = {row.id: row for row in batch.messages}
        decisions = [batch_selection.park_refused(rows[each.id], each, self._settings) for each in refused]
        self._store.park(self._lock, decisions)
        for each in decisions:
            LOGGER.warning("outbox: message %s of topic %r was parked: %s", each.id, topic.topic, each.reason)
        self._metrics.count("outbox_messages_parked", len(decisions), topic=topic.topic)
        self._state.suspect_topics.discard(topic.topic)

    # ---- heartbeats, notices and metrics

    def _heartbeat(self) -> None:
        if time.monotonic() >= self._heartbeat_at:
            self._store.heartbeat(self._lock)
            self._heartbeat_at = time.monotonic() + self._heartbeat_s

    def _rest(self, reason: str, rest_ms: int | None = None) -> None:
        LOGGER.warning("outbox: topic %r rests: %s", self._lock.topic, reason)
        self._metrics.count("outbox_rests", topic=self._lock.topic)
        chosen_ms = round(self._settings.rest_s * 1000) if rest_ms is None else rest_ms
        self._store.rest(self._lock, reason=reason, rest_ms=chosen_ms)

    def _clear_weak_notice(self, topic: port.TargetTopic) -> None:
        """Clear the notice of a missing fence; call it once a fence is in force and no session is open."""
        if topic.weak is None:
            self._state.reported_notices.pop(topic.topic, None)
            if self._lock.notice is not None and self._lock.notice.cause is port.NoticeCause.WEAK:
                self._store.notice(topic.topic, None)

    def _report_notice(self, notice: port.Notice) -> None:
        """Count the notice each time; log and store it only when it is new."""
        topic = self._lock.topic
        repeatable = notice.cause is port.NoticeCause.WEAK  # each lost session is reported, even with the same text
        self._metrics.count("outbox_at_least_once", topic=topic, cause=notice.cause.value)
        if not repeatable or self._state.reported_notices.get(topic) != notice:
            LOGGER.warning("outbox: topic %r is delivered at least once: %s", topic, notice.text)
            self._state.reported_notices[topic] = notice
        if not repeatable or self._lock.notice != notice:
            self._store.notice(topic, notice)

    def _count_sent(self, topic: port.TargetTopic, batch: port.MessageBatch, count: int | None = None) -> None:
        """Count the whole batch, or `count` of its messages, as sent."""
        sent = len(batch.messages) if count is None else count
        self._sent += sent
        self._metrics.count("outbox_sent", sent, topic=topic.topic)
        if count is None:
            self._metrics.count("outbox_batches", topic=topic.topic)
            self._state.suspect_topics.discard(topic.topic)
