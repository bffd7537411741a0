"""What operators ask of the outbox's tables: status, and the messages that lie aside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from tidebook.core.errors import NotFound
from tidebook.sql.port.dialect import Dialect
from tidebook.sql.port.outbox import Aside, ParkedMessage, Publishable, TopicStatus
from tidebook.sql.queries.outbox_publish import publish_statements
from tidebook.sql.queries.outbox_store import SqlOutboxStore, as_bytes

_STATES: Mapping[int, Literal["parked", "retrying", "held"]] = {0: "held", 1: "retrying", 2: "parked"}


class OperatedOutboxStore(SqlOutboxStore):
    """The operator's side, on top of the relay's."""

    dialect: ClassVar[Dialect]

    def publish(self, messages: Sequence[Publishable], *, ordered: bool) -> None:
        """Publish in a transaction of their own."""
        with self._transaction(durable=True):
            for sql, parameters in publish_statements(self.dialect, "format", messages, ordered=ordered):
                self._run(sql, parameters)

    def _topics_in_use(self) -> list[str]:
        """Every topic that has a waiting row."""
        raise NotImplementedError

    def status(self, *, count_max: int) -> list[TopicStatus]:
        """Every topic that waits or was ever relayed."""
        infos = {str(row[0]): row[1:] for row in self._rows(self._sql.infos)}
        aside: dict[str, dict[int, tuple[int, int]]] = {}
        for topic, state, count, age_ms in self._rows(self._sql.aside_counts):
            aside.setdefault(str(topic), {})[int(state)] = int(count), int(age_ms)
        names = sorted({*infos, *self._topics_in_use(), *aside})
        return [self._topic_status(name, infos.get(name), aside.get(name, {}), count_max) for name in names]

    def _topic_status(self, topic: str, info: Any, aside: Mapping[int, tuple[int, int]], count_max: int) -> TopicStatus:
        waiting = int(self._rows(self._sql.count, (topic, count_max))[0][0])
        ages_ms = [int(row[0]) for row in self._rows(self._sql.oldest, (topic,))]
        ages_ms += [aside[state][1] for state in (Aside.HELD, Aside.RETRYING) if state in aside]
        count = {state: each[0] for state, each in aside.items()}
        owner, locked_ms, error, retries, retry_ms, reason, notice, notice_ms, dirty, relayed, minute = info or (
            *(None, None, 0, 0, None, None, None, None, 0, 0, 0),
        )
        return TopicStatus(
            topic=topic,
            waiting=waiting,
            waiting_is_bound=waiting >= count_max,
            oldest_age_ms=max(ages_ms, default=None),
            locked_by=owner,
            locked_age_ms=_number(locked_ms),
            error=bool(error),
            retries=int(retries),
            retry_in_ms=_number(retry_ms),
            reason=reason,
            notice=notice,
            notice_age_ms=_number(notice_ms) if notice is not None else None,
            dirty=bool(dirty),
            relayed=int(relayed),
            per_minute=int(minute),
            parked=count.get(Aside.PARKED, 0) + count.get(Aside.RETRYING, 0),
            held=count.get(Aside.HELD, 0),
        )

    def parked(self, topic: str | None, *, limit: int) -> list[ParkedMessage]:
        """What lies aside, by topic and id."""
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
        """Put parked messages, and what they hold, back in their place."""
        with self._transaction(durable=True):
            found = self._parked_heads(topic, id)
            self._put_back(topic, list(found), {key for key in found.values() if key is not None}, "0")
        return len(found)

    def parked_drop(self, topic: str, id: int | None) -> int:
        """Delete parked messages, and put back what they held."""
        with self._transaction(durable=True):
            found = self._parked_heads(topic, id)
            for each in found:
                self._run(self._sql.delete_aside.format("id = %s"), (topic, each))
            self._put_back(topic, [], {key for key in found.values() if key is not None}, "tries")
        return len(found)

    def _parked_heads(self, topic: str, id: int | None) -> dict[int, bytes | None]:
        """Those that an operator may decide over; the topic's row is locked, as relays lock it.

        Where there is no such row, no relay has set anything of the topic aside.
        """
        self._rows(self._sql.lock_topic, (topic,))
        heads = self._rows(self._sql.heads.format(f"{Aside.RETRYING:d}, {Aside.PARKED:d}"), (topic,))
        found = {int(each): None if key is None else as_bytes(key) for each, key in heads}
        if id is None:
            return found
        if id not in found:
            raise NotFound(f"no message {id} of topic {topic!r} is parked: see 'tidebook outbox parked list'")
        return {id: found[id]}


def _number(value: Any) -> int | None:
    return None if value is None else int(value)
