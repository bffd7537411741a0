"""One topic, held by one thread: settle what the last owner left open, then send batch after batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import assert_never

import msgspec

from tidebook.core.clock import Ids
from tidebook.core.errors import Fenced, TidebookError
from tidebook.core.metrics import Metrics
from tidebook.log.relay_port import (
    Channel,
    Found,
    Outcome,
    Partly,
    Refusal,
    RelayTarget,
    Scan,
    Sent,
    TargetTopic,
    Unsure,
)
from tidebook.outbox import plan
from tidebook.outbox.settings import OutboxSettings
from tidebook.outbox.stop import Stop
from tidebook.sql.port.outbox import Batch, BatchLimit, Finished, Hold, NewSession, OutboxStore, Session

LOGGER = logging.getLogger("tidebook.outbox")

#: Signs of life in a lock limit.
BEATS = 6
#: How much of the fence's time a batch may use.
USABLE = 0.9
STEP_S_MOST = 0.5
#: How many batches share one question for the log's ends.
ENDS_BATCHES = 20
#: How a notice begins that holds while a topic has no fence.
WEAK = "messages may be sent twice after a pause: "


class _Stopped(Exception):
    """The relay was asked to end while it looked for what was sent."""


class Held:
    """A hold at work.

    `suspects` are topics that are sent singly until the message that Kafka refused is found; `said` is what was last
    said of topics that are at least once.
    """

    def __init__(
        self,
        hold: Hold,
        store: OutboxStore,
        target: RelayTarget,
        settings: OutboxSettings,
        *,
        outbox: bytes,
        ids: Ids,
        metrics: Metrics,
        stop: Stop,
        suspects: set[str],
        said: dict[str, str],
    ) -> None:
        self._hold = hold
        self._store = store
        self._target = target
        self._settings = settings
        self._outbox = outbox
        self._ids = ids
        self._metrics = metrics
        self._stop = stop
        self._suspects = suspects
        self._said = said
        self._beat_s = settings.lock_limit_s / BEATS
        self._beat_at = time.monotonic() + self._beat_s
        self._sent = 0
        #: A channel that another relay has fenced meanwhile is of no use.
        self._fresh = hold.previous_owner != hold.owner or hold.dirty is not None

    def relay(self) -> int:
        """Send what waits and let go of the topic; how many messages went.

        Raises Fenced where the lock was lost, and Unavailable where the database does not answer.
        """
        name, dirty = self._hold.topic, self._hold.dirty
        try:
            topic = self._target.topic(name, fresh=dirty is not None)
            self._say_weak(topic)
            if topic.fence == "lock":
                self._target.channel(topic, fresh=True)  # taken before anything is looked for
            if dirty is not None and not self._settle(topic, dirty):
                return 0
            self._take_back(topic)
            self._batches(topic)
        except _Stopped:
            self._store.unlock(self._hold)
        except Fenced:
            raise
        except TidebookError as error:
            # Whatever is wrong with one topic, the others go on. Where it is the database, this raises again.
            self._rest(str(error))
        finally:
            self._target.release(name)
        return self._sent

    # ---- what the last owner left open

    def _settle(self, topic: TargetTopic, session: Session) -> bool:
        """Look for an open session's messages, once none of them can still arrive; False if it is too early."""
        self._metrics.count("outbox_sessions_open", topic=topic.topic)
        if session.fence == "transaction":
            fenced = msgspec.structs.replace(topic, fence="transaction")
            self._target.channel(fenced, fresh=True)
            self._fresh = topic.fence != "transaction"
        elif session.fence not in {"lock", "append_id"} and session.age_ms < self._settings.lock_limit_ms:
            early_ms = self._settings.lock_limit_ms - session.age_ms
            reason = "a batch was left open: it is looked for once it can no longer arrive"
            self._store.rest(self._hold, reason=reason, rest_ms=early_ms, failed=False)
            return False
        committed = session.fence == "transaction"
        scan = Scan(session.uuid, frozenset(session.ids), session.scan_from, session.topic_uuid, committed)
        found = self._target.scan(topic, scan, self._step)
        if session.fence == "append_id":
            return self._send_again(topic, session)
        ids, lost = found.ids, found.lost
        if topic.needs_key and len(ids) < len(session.ids):
            ids, lost = self._compacted(topic, session, found)
        self._metrics.count("outbox_found", len(ids), topic=topic.topic)
        if lost is not None:
            self._say(f"{len(session.ids) - len(ids)} messages may be sent twice: {lost}", "lost")
        self._store.finish(self._hold, Finished(sorted(ids)), unlock=False)
        return True

    def _compacted(self, topic: TargetTopic, session: Session, found: Found) -> tuple[frozenset[int], str | None]:
        """What is in a compacted topic, or was; and why some of the rest may have been there."""
        ids = found.ids
        if len(session.scan_from) == topic.partitions:  # else a key may have been sent to two partitions
            ids |= plan.proven(self._store.open_rows(self._hold, session), ids)
        if found.lost is None and found.holes and len(ids) < len(session.ids):
            return ids, "the topic is compacted, and they may have been there"
        return ids, found.lost if len(ids) < len(session.ids) else None

    def _send_again(self, topic: TargetTopic, session: Session) -> bool:
        """The same rows under the same ids, and no others: a row left out would lose its place in the session."""
        rows = self._store.open_rows(self._hold, session)
        batch = Batch(session.uuid, rows, 0, more=True)
        if rows:
            outcome = self._send(topic, batch)
            if not isinstance(outcome, Sent):
                return self._failed(topic, batch, outcome)
            self._count_sent(topic, batch)
        self._store.finish(self._hold, Finished([row.id for row in rows]), unlock=False)
        return True

    def _step(self) -> None:
        if self._stop.asked() and self._stop.overdue():
            raise _Stopped
        self._beat()

    # ---- batches

    def _batches(self, topic: TargetTopic) -> None:
        settings = self._settings
        self._target.channel(topic, fresh=self._fresh)
        finished: Finished | None = None
        limit = BatchLimit(settings.batch_rows, settings.batch_bytes)
        for number in range(1, settings.hold_batches_max + 1):
            # Everything of this hold lies at or behind these: asking anew now and then only makes a scan shorter.
            asked = number % ENDS_BATCHES == 1 or topic.fence == "append_id"
            ends = self._target.ends(topic, fresh=number > 1) if asked else None
            session = NewSession(self._ids.new(), topic.fence, topic.uuid, ends)
            batch = self._store.begin(
                self._hold, session, lambda rows, held: plan.choose(rows, held, topic, settings), limit, finished
            )
            self._beat_at = time.monotonic() + self._beat_s
            finished = None
            self._count_aside(topic, batch)
            if not batch.messages:
                if batch.more or batch.set_aside:
                    continue
                break
            outcome = self._send(topic, batch)
            if not isinstance(outcome, Sent):
                if not self._failed(topic, batch, outcome):
                    return
                continue
            self._count_sent(topic, batch)
            finished = Finished([row.id for row in batch.messages])
            if not batch.more or self._stop.asked() or number == settings.hold_batches_max:
                self._store.finish(self._hold, finished, unlock=True)
                self._look_ahead(topic)
                return
        self._store.unlock(self._hold)

    def _look_ahead(self, topic: TargetTopic) -> None:
        """Ask for the log's ends now, where nobody waits for it, for the sake of whoever publishes next."""
        if topic.fence in {"timestamp", "transaction", "none"}:
            with suppress(TidebookError):
                self._target.ends(topic, fresh=True)

    def _send(self, topic: TargetTopic, batch: Batch) -> Outcome:
        channel = self._target.channel(topic, fresh=False, singly=topic.topic in self._suspects)
        started = time.monotonic()
        try:
            channel.start(
                plan.relayed(batch.messages, session=batch.session, outbox=self._outbox), timestamp_ms=batch.opened_ms
            )
            outcome = self._await(channel, started + self._settings.fence_ms / 1000 * USABLE)
        except BaseException:
            channel.drop()
            raise
        if not isinstance(outcome, Sent):
            channel.drop()
        self._metrics.time("outbox_send", time.monotonic() - started)
        return outcome

    def _await(self, channel: Channel, deadline: float) -> Outcome:
        step_s = min(STEP_S_MOST, self._beat_s)
        while (outcome := channel.wait(step_s)) is None:
            self._beat()
            if time.monotonic() > deadline:
                return Unsure("Kafka did not acknowledge the batch in time")
            if self._stop.overdue():
                return Unsure("the relay was stopped before Kafka had acknowledged the batch")
        return outcome

    def _failed(self, topic: TargetTopic, batch: Batch, outcome: Partly | Unsure) -> bool:
        """Act on a batch that did not go as a whole; True to go on with the next one."""
        match outcome:
            case Partly(sent=sent, refused=refused):
                if refused:  # before the session is closed: a doubtful one must not be taken for a fresh one
                    self._set_aside(topic, batch, refused)
                self._store.finish(self._hold, Finished(sorted(sent)), unlock=False)
                self._count_sent(topic, batch, len(sent))
                return True
            case Unsure():
                if outcome.suspect:
                    self._suspects.add(topic.topic)
                if outcome.sent:
                    self._store.forget(self._hold, Finished(sorted(outcome.sent)))
                    self._count_sent(topic, batch, len(outcome.sent))
                if self._stop.asked():
                    self._store.unlock(self._hold)
                else:
                    reason = _late(outcome.reason, topic) if outcome.late else outcome.reason
                    self._rest(reason, self._rest_ms(topic, outcome))
                return False
            case _:
                assert_never(outcome)

    def _rest_ms(self, topic: TargetTopic, outcome: Unsure) -> int:
        rest_ms = 0 if outcome.late or outcome.suspect else round(self._settings.rest_s * 1000)
        if topic.fence in {"timestamp", "none"}:  # earlier, the session could not be looked for
            return max(rest_ms, self._settings.lock_limit_ms)
        return rest_ms

    def _set_aside(self, topic: TargetTopic, batch: Batch, refused: Sequence[Refusal]) -> None:
        rows = {row.id: row for row in batch.messages}
        aside = [plan.refused(rows[each.id], each, self._settings) for each in refused]
        self._store.set_aside(self._hold, aside)
        for each in aside:
            LOGGER.warning("outbox: message %s of topic %r was set aside: %s", each.id, topic.topic, each.reason)
        self._metrics.count("outbox_set_aside", len(aside), topic=topic.topic)
        self._suspects.discard(topic.topic)

    # ---- signs of life, and what is told

    def _beat(self) -> None:
        if time.monotonic() >= self._beat_at:
            self._store.heartbeat(self._hold)
            self._beat_at = time.monotonic() + self._beat_s

    def _rest(self, reason: str, rest_ms: int | None = None) -> None:
        LOGGER.warning("outbox: topic %r rests: %s", self._hold.topic, reason)
        self._metrics.count("outbox_rests", topic=self._hold.topic)
        chosen_ms = round(self._settings.rest_s * 1000) if rest_ms is None else rest_ms
        self._store.rest(self._hold, reason=reason, rest_ms=chosen_ms)

    def _say_weak(self, topic: TargetTopic) -> None:
        self._metrics.gauge("outbox_exactly_once", 0 if topic.weak else 1, topic=topic.topic)
        if topic.weak is not None:
            self._say(f"{WEAK}{topic.weak}", "weak")

    def _take_back(self, topic: TargetTopic) -> None:
        """A fence is in force again, and nothing is open from before."""
        if topic.weak is None:
            self._said.pop(topic.topic, None)
            if self._hold.notice is not None and self._hold.notice.startswith(WEAK):
                self._store.notice(topic.topic, None)

    def _say(self, text: str, cause: str) -> None:
        """Counted each time; told, and written down, when it is news."""
        topic = self._hold.topic
        self._metrics.count("outbox_at_least_once", topic=topic, cause=cause)
        if cause != "weak" or self._said.get(topic) != text:
            LOGGER.warning("outbox: topic %r is at least once: %s", topic, text)
            self._said[topic] = text
        if cause != "weak" or self._hold.notice != text:
            self._store.notice(topic, text)

    def _count_sent(self, topic: TargetTopic, batch: Batch, count: int | None = None) -> None:
        """All of a batch, or so many of it."""
        sent = len(batch.messages) if count is None else count
        self._sent += sent
        self._metrics.count("outbox_sent", sent, topic=topic.topic)
        if count is None:
            self._metrics.count("outbox_batches", topic=topic.topic)
            self._suspects.discard(topic.topic)

    def _count_aside(self, topic: TargetTopic, batch: Batch) -> None:
        if batch.set_aside:
            LOGGER.warning("outbox: %s messages of topic %r were set aside", batch.set_aside, topic.topic)
            self._metrics.count("outbox_set_aside", batch.set_aside, topic=topic.topic)


def _late(reason: str, topic: TargetTopic) -> str:
    return (
        f"{reason}: the batch was over {topic.fence_ms:,} ms old when it came to the broker; "
        "where this goes on, the clocks of database and brokers differ by more than that"
    )
