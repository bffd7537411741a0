"""Run a simulation, then damage rows and repair them from the log, during reads and late replays of old slices."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from tests.simulation.cluster import NONE, Faults
from tests.simulation.history import PARTITION, TAGS, TOPIC
from tests.simulation.simulation import Run, Wrong, events_of, read_everything
from tidebook.core.buckets import Buckets
from tidebook.core.errors import OutcomeUnknown, Unavailable
from tidebook.core.event import Event, encode_event
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position, write_stamp
from tidebook.core.record import read_record
from tidebook.core.replication_plan import EventRow, Pointer, PositionedAction, PutEvents, SliceWrites, TagRow, plan_key
from tidebook.core.segments import event_segment
from tidebook.replication.journal_state import FoldedJournal, JournalState, plan_repair
from tidebook.store.cassandra import CassandraStore
from tidebook.store.cassandra import statements as cql
from tidebook.store.cassandra.mutations import CqlStatement, event_batches
from tidebook.store.cassandra.rows import EVENTS_PER_ROW_MAX
from tidebook.store.cassandra.tag_writes import clear_batches

#: The faults during a repair: replicas are slow, and answers are lost.
SLOW = Faults(late=0.1, unanswered=0.02)


class RepairedRun(Run):
    """A run that finally damages one journal on all replicas, and repairs it."""

    async def go(self) -> None:
        await super().go()
        truth = self.history.truths[-1]
        live = [id for id, head in truth.heads.items() if head.live and truth.rows[id]]
        if not live:
            return
        id = self.dice.choice(live)
        store = self.clients.store()
        last = Position(self.config.epoch, len(self.history.records) - 1)
        pointer = Pointer(last, truth.time_ms)
        await self._damage(store, id, pointer)
        found = await read_everything(self.clients.store(asks=range(3)))
        expected = self._state(truth.heads[id], truth.rows[id], [row for tag in TAGS for row in truth.tags[tag]], id)
        damaged_state = self._state(
            found.heads[id], found.events_of_table[id], [row for tag in TAGS for row in found.tags[tag]], id
        )
        folded = FoldedJournal(Key(TOPIC, id), PARTITION, expected, Position(self.config.epoch, 0), False)
        intact = {row for row in truth.rows[id] if damaged_state.rows.get(row.seq_nr) == row}
        reading = asyncio.ensure_future(self._read_during_repair(id, truth.heads[id], intact))
        self.cluster.faults = SLOW
        try:
            await self._repair(store, folded, damaged_state, pointer)
        finally:
            self.cluster.faults = NONE
            reading.cancel()
        await asyncio.wait([reading])
        if not reading.cancelled():
            reading.result()
        await asyncio.sleep(10)  # until late mutations have arrived
        await self.check_all()
        await self._replay()
        await self.check_all()

    def _state(self, head: Head, rows: tuple[EventRow, ...], tags: list[TagRow], id: str) -> JournalState:
        of_id = [row for row in tags if row.id == id]
        return JournalState(head, {row.seq_nr: row for row in rows}, {row.place: row for row in of_id})

    async def _damage(self, store: CassandraStore, id: str, pointer: Pointer) -> None:
        """Remove and change an event row, add one, and remove tag rows, under a stamp that wins over all of them."""
        dice, truth = self.dice, self.history.truths[-1]
        head, rows = truth.heads[id], truth.rows[id]
        stamp = write_stamp(pointer.position)
        key, chosen = Key(TOPIC, id), dice.choice(rows)
        segment = event_segment(chosen.seq_nr, head.segment_size)
        wrong = msgspec.structs.replace(chosen, encoded=encode_event(Event("wrong")))
        damages = [
            [CqlStatement(cql.CLEAR_EVENT, [stamp, id, TOPIC, segment, chosen.seq_nr])],
            # both as a single row, and within its packed row
            *event_batches(PutEvents(key, head, (wrong,)), stamp=stamp, packed=False),
            *event_batches(PutEvents(key, head, self._packed_with(rows, wrong)), stamp=stamp),
        ]
        if head.delete_to:
            below = EventRow(head.delete_to, encode_event(Event("deleted")), 5, pointer.position, 0)
            damages += event_batches(PutEvents(key, head, (below,)))
        of_id = [row.place for tag in TAGS for row in truth.tags[tag] if row.id == id]
        if of_id:
            some = dice.sample(of_id, dice.randint(1, len(of_id)))
            damages += clear_batches(some, pointer.position, Buckets())
        for batch in dice.sample(damages, dice.randint(1, len(damages))):
            await store.write(batch)

    def _packed_with(self, rows: Sequence[EventRow], wrong: EventRow) -> tuple[EventRow, ...]:
        """Return the events of one packed row, with `wrong` in place of the event with its number."""

        def packed_row(row: EventRow) -> tuple[Position, int, int]:
            segment = event_segment(row.seq_nr, self.config.segment_size)
            return row.position, row.index // EVENTS_PER_ROW_MAX, segment

        of_row = (row for row in rows if packed_row(row) == packed_row(wrong))
        return tuple(wrong if row.seq_nr == wrong.seq_nr else row for row in of_row)

    async def _repair(
        self, store: CassandraStore, folded: FoldedJournal, found: JournalState, pointer: Pointer
    ) -> None:
        repair = plan_repair(folded, found, pointer, self.config, rev=1)
        for _ in range(20):
            try:
                return await store.repair(repair)
            except (Unavailable, OutcomeUnknown):
                continue
        raise Wrong("the repair did not finish")

    async def _read_during_repair(self, id: str, head: Head, intact: set[EventRow]) -> None:
        """Check that the rows that were correct before the repair can always be read."""
        store = self.clients.store()
        while True:
            await asyncio.sleep(self.dice.random() * 0.02)
            try:
                rows = await events_of(store, id, head)
            except Unavailable:
                continue
            if missing := intact - set(rows):
                raise Wrong(f"while {id} was repaired {missing} were not there")

    async def _replay(self) -> None:
        """Apply a slice that was planned while the store was empty."""
        records = self.history.records[: self.dice.randint(1, len(self.history.records))]
        by_id: dict[str, list[PositionedAction]] = {}
        time_ms = 0
        for record in records:
            time_ms = max(time_ms, record.timestamp_ms)
            if record.key is not None and (record.value or b"")[:1] != b"\0":
                action = read_record(record.value, limit_bytes=self.config.limit_bytes)
                position = Position(self.config.epoch, record.offset)
                by_id.setdefault(record.key.decode(), []).append(
                    PositionedAction(position, record.timestamp_ms, action, time_ms)
                )
        keys = tuple(plan_key(Key(TOPIC, id), None, actions, self.config) for id, actions in by_id.items())
        pointer = Pointer(Position(self.config.epoch, len(records) - 1), time_ms)
        await self.clients.store().apply(SliceWrites(TOPIC, PARTITION, None, pointer, keys))
