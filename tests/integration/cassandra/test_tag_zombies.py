"""A replicator that is paused at any write, and continues after another has done its work, changes no tag row."""

from __future__ import annotations

import pytest

from tests.integration.cassandra.held import PARTITIONS, OpenStore, Stage, Trial, run_trials
from tests.integration.cassandra.held import new_topic as new_topic
from tests.integration.cassandra.held import settings as settings
from tests.integration.cassandra.test_zombies import CHOSEN, histories, steps_of
from tidebook.core.action import Action, Append
from tidebook.core.event import Event, encode_event, encode_events, event_tags, pack_events, unpack_events
from tidebook.core.fold import AppendApplied, DeleteApplied, PurgeApplied, fold
from tidebook.core.head import Head
from tidebook.core.key import Key, partition_of
from tidebook.core.position import Position
from tidebook.core.replication_plan import EventRow, TagRow, tag_row
from tidebook.core.topic_config import TopicConfig
from tidebook.testing.conformance.journal_records import Step, records_of

pytestmark = pytest.mark.cassandra

AT_ONCE = 50
END_MS = 2**62


def tagged_steps(trial: Trial, id: str, tag: str) -> list[Step]:
    """Tag all events of most appends of the history, and every second event of the third and later ones."""
    steps: list[Step] = []
    for number, (_, action) in enumerate(steps_of(trial.history, id)):
        if isinstance(action, Append):
            action = with_tag(action, tag, every=2 if number >= 2 else 1)
        steps.append((id, action))
    return steps


def with_tag(action: Append, tag: str, *, every: int) -> Action:
    events = [Event(n, tags={tag} if n % every == 0 else ()) for n in range(action.count)]
    body = pack_events([encode_event(event) for event in events])
    return Append(action.epoch, b"", action.count, body, action.expected, action.at, tagged=encode_events(events)[1])


def truth(steps: list[Step], config: TopicConfig, key: Key, tag: str) -> list[TagRow]:
    """Return the expected rows, counted in the simplest way."""
    head: Head | None = None
    rows: list[TagRow] = []
    count = 0
    for record, (_, action) in zip(records_of(steps), steps, strict=True):
        if isinstance(action, Append):
            action = Append(
                action.epoch, record.offset.to_bytes(16, "big"), action.count, action.body, action.expected, action.at,
                tagged=action.tagged,
            )  # fmt: skip
        at = Position(config.epoch, record.offset)
        before = head
        head, change = fold(head, action, at, record.timestamp_ms, config)
        match change:
            case PurgeApplied():
                rows, count = [], 0
            case DeleteApplied(to=to):
                rows = [row for row in rows if row.seq_nr > to]
                count = 0 if before is None or not before.live else count
            case AppendApplied(first=first):
                assert head is not None
                assert isinstance(action, Append)
                for i, kept in enumerate(unpack_events(action.body)):
                    if tag in event_tags(kept):
                        count += 1
                        event = EventRow(first + i, kept, record.timestamp_ms, at, i, record.timestamp_ms)
                        rows.append(tag_row(tag, key, partition_of(key.id, PARTITIONS), head.incarnation, count, event))
            case _:
                pass
    return rows


@pytest.mark.timeout(3600)
async def test_a_replicator_paused_at_any_write_and_resumed_late_changes_no_tag_row(
    open_store: OpenStore, new_topic: tuple[str, TopicConfig], long_form: bool
) -> None:
    topic, of_topic = new_topic
    stage = Stage(await open_store(), await open_store(), topic, of_topic)
    chosen = [*histories((1, 2, 3)), *CHOSEN] if long_form else ["3 del2", "3 purge", "1 3", *CHOSEN[:2]]

    async def hold_one(trial: Trial) -> bool:
        id, tag = f"{trial}", f"{topic}-{trial.history}-{trial.start}-{trial.stop}-{trial.held_at}-{trial.whole}"
        steps = tagged_steps(trial, id, tag)
        reached = await stage.hold(trial, id, steps)
        found = await stage.store.tag_rows(tag, after=None, from_ms=0, until_ms=END_MS, limit=100)
        assert list(found) == truth(steps, of_topic, Key(topic, id), tag), trial
        return reached

    assert await run_trials(hold_one, chosen, at_once=AT_ONCE) > 10 * len(chosen)
