"""The operator's queries on the outbox's tables: status, and parked messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from tidebook.core.errors import NotFound
from tidebook.outbox.dialect import Dialect
from tidebook.outbox.port import NoticeCause, OutboxTopicStatus, ParkedMessage, ParkedState, Publishable
from tidebook.outbox.sql_publish import publish_statements
from tidebook.outbox.sql_store import SqlOutboxStore, as_bytes

_STATES: Mapping[int, Literal["parked", "retrying", "held"]] = {
    ParkedState.HELD: "held",
    ParkedState.RETRYING: "retrying",
    ParkedState.PARKED: "parked",
}


class OperatorOutboxStore(SqlOutboxStore):
    """Adds publishing, status and the handling of parked messages to the relay's store."""

    dialect: ClassVar[Dialect]

    def publish(self, messages: Sequence[Publishable], *, ordered: bool) -> None:
        """Publish the messages in a separate transaction."""
        with self._transaction(durable=True):
            for sql, parameters in publish_statements(self.dialect, "format", messages, ordered=ordered):
                self._run(sql, parameters)

    def _topics_in_use(self) -> list[str]:
        """Return every topic that has a waiting row."""
        raise NotImplementedError

    def status(self, *, count_max: int) -> list[OutboxTopicStatus]:
        """Return the status of every topic that has waiting messages or was ever relayed."""
        topic_infos = {str(row[0]): row[1:] for row in self._rows(self._sql.topic_infos)}
        parked_by_state: dict[str, dict[int, tuple[int, int]]] = {}
        for topic, state, count, age_ms in self._rows(self._sql.parked_counts):
            parked_by_state.setdefault(str(topic), {})[int(state)] = int(count), int(age_ms)
        names = sorted({*topic_infos, *self._topics_in_use(), *parked_by_state})
        return [
            self._topic_status(name, topic_infos.get(name), parked_by_state.get(name, {}), count_max) for name in names
        ]

    def _topic_status(
        self, topic: str, info: Any, parked_by_state: Mapping[int, tuple[int, int]], count_max: int
    ) -> OutboxTopicStatus:
        waiting = int(self._rows(self._sql.count, (topic, count_max))[0][0])
        ages_ms = [int(row[0]) for row in self._rows(self._sql.oldest, (topic,))]
        ages_ms += [
            parked_by_state[state][1] for state in (ParkedState.HELD, ParkedState.RETRYING) if state in parked_by_state
        ]
        count = {state: each[0] for state, each in parked_by_state.items()}
        owner, locked_ms, error, retries, retry_ms, reason, cause, notice, notice_ms, dirty, relayed, minute = info or (
            *(None, None, 0, 0, None, None, None, None, None, 0, 0, 0),
        )
        return OutboxTopicStatus(
            topic=topic,
            waiting=waiting,
            waiting_is_bound=waiting >= count_max,
            oldest_age_ms=max(ages_ms, default=None),
            locked_by=owner,
            locked_age_ms=_optional_int(locked_ms),
            error=bool(error),
            retries=int(retries),
            retry_in_ms=_optional_int(retry_ms),
            reason=reason,
            notice=notice,
            notice_cause=NoticeCause(cause) if cause is not None else None,
            notice_age_ms=_optional_int(notice_ms) if notice is not None else None,
            dirty=bool(dirty),
            relayed=int(relayed),
            per_minute=int(minute),
            parked=count.get(ParkedState.PARKED, 0) + count.get(ParkedState.RETRYING, 0),
            held=count.get(ParkedState.HELD, 0),
        )

    def parked(self, topic: str | None, *, limit: int) -> list[ParkedMessage]:
        """Return the messages in `kafka_parked`, by topic and id."""
        where = "WHERE topic = %s " if topic is not None else ""
        parameters = (*((topic,) if topic is not None else ()), limit)
        rows = self._rows(f"{self._sql.parked}{where}ORDER BY topic, id LIMIT %s", parameters)
        return [
            ParkedMessage(
                topic=str(name),
                id=int(id),
                state=_STATES[int(state)],
                key=None if key is None else as_bytes(key),
                size_bytes=int(size),
                tries=int(tries),
                age_ms=int(age_ms),
                parked_age_ms=int(parked_ms),
                reason=str(reason),
            )
            for name, id, state, key, size, tries, age_ms, parked_ms, reason in rows
        ]

    def parked_retry(self, topic: str, id: int | None) -> int:
        """Move parked messages, and those held by them, back; return how many were parked."""
        with self._transaction(durable=True):
            found = self._parked_heads(topic, id)
            self._unpark(topic, list(found), {key for key in found.values() if key is not None}, "0")
        return len(found)

    def parked_drop(self, topic: str, id: int | None) -> int:
        """Delete parked messages, and move those held by them back; return how many were deleted."""
        with self._transaction(durable=True):
            found = self._parked_heads(topic, id)
            for each in found:
                self._run(self._sql.delete_parked.format("id = %s"), (topic, each))
            self._unpark(topic, [], {key for key in found.values() if key is not None}, "tries")
        return len(found)

    def _parked_heads(self, topic: str, id: int | None) -> dict[int, bytes | None]:
        """Return the messages that an operator may retry or drop, and lock the topic's row as relays do.

        If there is no such row, no relay has parked anything of the topic.
        """
        self._rows(self._sql.lock_topic, (topic,))
        parked_heads = self._rows(
            self._sql.parked_heads.format(f"{ParkedState.RETRYING:d}, {ParkedState.PARKED:d}"), (topic,)
        )
        found = {int(each): None if key is None else as_bytes(key) for each, key in parked_heads}
        if id is None:
            return found
        if id not in found:
            raise NotFound(f"no message {id} of topic {topic!r} is parked: see 'tidebook outbox parked list'")
        return {id: found[id]}


def _optional_int(value: Any) -> int | None:
    return None if value is None else int(value)
