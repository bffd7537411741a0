"""Many tasks in two books, interleaved by a seed: every result agrees with the log, folded from its start."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.journal.rig import TOPIC, Rig
from tidebook.core.action import Append
from tidebook.core.errors import Conflict, Fenced, Truncated
from tidebook.core.event import read_payload, unpack_events
from tidebook.core.fold import AppendApplied, PurgeApplied, Rejected, fold
from tidebook.core.head import Head
from tidebook.core.position import Position
from tidebook.core.record import read_record
from tidebook.log.port import Record, read_all

OpenRig = Callable[..., Rig]
IDS = ["a", "b"]
Seen = list[tuple[int, Any]]


class Truth:
    """The whole log, folded: each journal after every offset, and the outcome of every append."""

    def __init__(self, records: list[Record], config: Any) -> None:
        self.outcomes: dict[int, Any] = {}
        heads: dict[str, Head | None] = dict.fromkeys(IDS)
        events: dict[str, dict[int, Any]] = {id: {} for id in IDS}
        self.after: list[dict[str, tuple[int | None, Seen]]] = [self._shown(heads, events)]
        for offset, record in enumerate(records):
            assert record.offset == offset
            if record.key is not None:
                id = record.key.decode()
                action = read_record(record.value, limit_bytes=config.limit_bytes)
                at = Position(config.epoch, offset)
                heads[id], change = fold(heads[id], action, at, record.timestamp_ms, config)
                self.outcomes[offset] = change
                if isinstance(change, PurgeApplied):
                    events[id] = {}
                elif isinstance(change, AppendApplied):
                    assert isinstance(action, Append)
                    for i, kept in enumerate(unpack_events(action.body)):
                        events[id][change.first + i] = read_payload(kept)
            self.after.append(self._shown(heads, events))

    def _shown(
        self, heads: dict[str, Head | None], events: dict[str, dict[int, Any]]
    ) -> dict[str, tuple[int | None, Seen]]:
        shown: dict[str, tuple[int | None, Seen]] = {}
        for id, head in heads.items():
            if head is None or not head.live:
                shown[id] = (None, [])
            else:
                seen = sorted((n, payload) for n, payload in events[id].items() if n > head.delete_to)
                shown[id] = (head.seq_nr, seen)
        return shown


class Day:
    """The calls of the tasks of one run, and their results."""

    def __init__(self, rigs: list[Rig], dice: random.Random) -> None:
        self.rigs, self.dice = rigs, dice
        self.appends: list[tuple[int, int | None, int | None]] = []
        self.conflicts = 0
        self.reads: list[tuple[str, int, int, Seen]] = []
        self.pointers: list[tuple[str, int, int, int | None]] = []
        self.over = False

    async def end(self) -> int:
        return await self.rigs[0]._log.end(TOPIC, 0)

    async def write(self, name: int) -> None:
        rig = self.rigs[name % 2]
        for i in range(12):
            id = self.dice.choice(IDS)
            match self.dice.randrange(10):
                case 0:
                    await rig.journal.delete(id, to=self.dice.randint(1, 6))
                case 1:
                    await rig.journal.purge(id)
                case 2 | 3 | 4:
                    stands = await rig.journal.pointer(id)
                    await self.append(rig, id, f"{name}.{i}", expected=stands or 0)
                case 5:
                    await self.append(rig, id, f"{name}.{i}", at=self.dice.randint(1, 30))
                case _:
                    await self.append(rig, id, f"{name}.{i}", confirm=self.dice.random() < 0.8)

    async def append(self, rig: Rig, id: str, payload: str, **how: Any) -> None:
        try:
            done = await rig.append(id, payload, payload, **how)
        except Conflict:
            self.conflicts += 1
        else:
            self.appends.append((done.offset, done.first, done.last))

    async def read(self, name: int) -> None:
        rig = self.rigs[name % 2]
        while not self.over:
            id, least = self.dice.choice(IDS), await self.end() - 1
            if self.dice.random() < 0.3:
                last = await rig.journal.pointer(id)
                self.pointers.append((id, least, await self.end() - 1, last))
                continue
            try:
                seen = [(event.seq_nr, event.payload) async for event in rig.journal.read(id)]
            except Truncated:
                continue
            self.reads.append((id, least, await self.end() - 1, seen))
            await asyncio.sleep(0)

    async def replicate(self) -> None:
        while not self.over:
            try:
                await self.rigs[0].replicate(batch_records=self.dice.randint(1, 6), batches_max=1)
            except Fenced:
                pass
            for _ in range(self.dice.randrange(30)):
                await asyncio.sleep(0)

    async def run(self) -> None:
        others = [asyncio.create_task(each) for each in (self.read(0), self.read(1), self.read(2), self.replicate())]
        await asyncio.gather(*(self.write(name) for name in range(4)))
        self.over = True
        await asyncio.gather(*others)


@pytest.mark.parametrize("seed", range(6))
async def test_every_answer_is_what_the_folded_log_says(open_rig: OpenRig, seed: int) -> None:
    dice = random.Random(seed)
    rigs = [open_rig(tail_bytes_max=60, cached_heads_max=1 + seed % 2, cached_offsets_max=20) for _ in range(2)]
    for rig in rigs:
        await rig.journal.create()
        rig.log_faults.shake(dice)
        rig.store_faults.shake(dice)
    day = Day(rigs, dice)
    await asyncio.wait_for(day.run(), 100)
    for rig in rigs:
        rig.log_faults.heal()
    config, end = await rigs[0].journal.create(), await day.end()
    truth = Truth(list(await read_all(rigs[0].log, TOPIC, 0, start=0, stop=end)), config)

    for offset, first, last in day.appends:
        change = truth.outcomes[offset]
        assert (
            isinstance(change, AppendApplied) and first in (change.first, None) and last in (change.last, None)
        ) or (first is None and isinstance(change, Rejected)), (offset, first, last, change)
    assert day.conflicts <= sum(isinstance(change, Rejected) for change in truth.outcomes.values())
    for id, least, most, seen in day.reads:
        journals = [truth.after[offset + 1][id][1] for offset in range(least, most + 1)]
        assert seen in journals, (id, least, most, seen, journals)
    for id, least, most, last in day.pointers:
        assert last in [truth.after[offset + 1][id][0] for offset in range(least, most + 1)]
    assert day.reads
    await rigs[0].replicate()
    for id in IDS:
        assert [(e.seq_nr, e.payload) async for e in rigs[1].journal.read(id)] == truth.after[-1][id][1]
