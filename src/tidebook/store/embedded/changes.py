"""What else the writer does in `store.db`: snapshots, facts, settings, parked records. Each may be run again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tidebook.core.errors import Corrupt, NotFound
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication import Parked
from tidebook.core.topic import TopicFacts
from tidebook.folder.inbox import Session
from tidebook.store.port import Snapshot


class Save(NamedTuple):
    """A snapshot to be kept."""

    key: Key
    incarnation: Position
    snapshot: Snapshot
    slots: int


class Drop(NamedTuple):
    """Snapshots to be removed."""

    key: Key
    incarnation: Position
    to: int


class NewFacts(NamedTuple):
    """Facts to be set where the others hold."""

    topic: str
    facts: TopicFacts
    expected: TopicFacts | None


class NewSetting(NamedTuple):
    """A setting to be set where the other holds."""

    name: str
    value: str
    expected: str | None


encode_facts = msgspec.json.Encoder().encode
_decode_facts = msgspec.json.Decoder(TopicFacts).decode

_LIFE = 'topic = ? AND id = ? AND epoch = ? AND "offset" = ?'


def decode_facts(data: bytes) -> TopicFacts:
    """Undo `encode_facts`."""
    try:
        return _decode_facts(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError) as error:
        raise Corrupt(f"the facts of a topic are damaged ({error}): restore a copy of store.db") from error


def save_snapshots(session: Session, saves: Sequence[Save]) -> list[None]:
    """Keep snapshots, the newest of each life."""
    execute = session.connection.execute
    for key, incarnation, new, slots in saves:
        life = (*key, *incarnation)
        execute(
            "INSERT OR REPLACE INTO snapshot VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (*life, new.seq_nr, new.payload_type, new.payload, new.timestamp_ms),
        )
        execute(
            f"""DELETE FROM snapshot WHERE {_LIFE} AND seq_nr <=
            (SELECT seq_nr FROM snapshot WHERE {_LIFE} ORDER BY seq_nr DESC LIMIT 1 OFFSET ?)""",
            (*life, *life, slots),
        )
    return [None] * len(saves)


def drop_snapshots(session: Session, drops: Sequence[Drop]) -> list[None]:
    """Remove snapshots."""
    for key, incarnation, to in drops:
        session.connection.execute(f"DELETE FROM snapshot WHERE {_LIFE} AND seq_nr <= ?", (*key, *incarnation, to))
    return [None] * len(drops)


def set_facts(session: Session, wanted: Sequence[NewFacts]) -> list[TopicFacts | NotFound]:
    """Compare and set facts; what holds afterwards."""
    return [_set_facts(session, each) for each in wanted]


def _set_facts(session: Session, new: NewFacts) -> TopicFacts | NotFound:
    execute = session.connection.execute
    row = execute("SELECT facts FROM facts WHERE topic = ?", (new.topic,)).fetchone()
    held = None if row is None else decode_facts(row[0])
    if held == new.expected:
        execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (new.topic, encode_facts(new.facts)))
        return new.facts
    if held is None:
        return NotFound(f"the store has no facts of topic {new.topic!r}: set them with expected=None")
    return held


def set_settings(session: Session, wanted: Sequence[NewSetting]) -> list[bool]:
    """Compare and set settings; whether each was as expected."""
    done = []
    for name, value, expected in wanted:
        row = session.connection.execute("SELECT value FROM setting WHERE name = ?", (name,)).fetchone()
        as_expected = (None if row is None else row[0]) == expected
        if as_expected:
            session.connection.execute("INSERT OR REPLACE INTO setting VALUES (?, ?)", (name, value))
        done.append(as_expected)
    return done


def unpark(session: Session, wanted: Sequence[Sequence[Parked]]) -> list[None]:
    """Forget parked records."""
    for parked in wanted:
        for each in parked:
            session.connection.execute(
                'DELETE FROM parked WHERE topic = ? AND partition = ? AND epoch = ? AND "offset" = ?',
                (each.topic, each.partition, *each.position),
            )
    return [None] * len(wanted)
