"""Reader, head cache, replicator and store agree on every record of an embedded log, whatever its content."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.core.nonsense import NONSENSE, rests, sealed
from tests.unit.journal.rig import Kind, Rig
from tidebook.core.action import Damaged
from tidebook.core.errors import Corrupt
from tidebook.core.fold import fold
from tidebook.core.head import Head
from tidebook.core.position import Position
from tidebook.core.record import MAGIC, VERSION, read_record

#: The keys of two journals, a key that is no journal id, and no key.
keys = st.sampled_from([b"a", b"a", b"a", b"b", b"\xff", b"\x00", None])
records = st.lists(st.tuples(keys, rests.filter(lambda rest: _epoch(rest) <= 1)), min_size=1, max_size=6)
IDS = ("a", "b")


def _epoch(rest: bytes) -> int:
    """Keep the epoch: a record of a later one stops every reader with this configuration, which another test covers."""
    return getattr(read_record(sealed(MAGIC, VERSION, rest), limit_bytes=10**6), "epoch", 1)


@pytest.mark.parametrize("kind", ["indexed", "like kafka"])
def test_all_parts_agree_on_arbitrary_records(kind: Kind, long_form: bool) -> None:
    @settings(
        max_examples=150 if long_form else 15,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(records, records, st.integers(1, 4))
    def agree(first: list[tuple[bytes | None, bytes]], second: list[tuple[bytes | None, bytes]], batch: int) -> None:
        with tempfile.TemporaryDirectory(prefix="tidebook-") as folder:
            asyncio.run(_agree(Path(folder), kind, first, second, batch))

    agree()


@pytest.mark.parametrize("kind", ["indexed", "like kafka"])
async def test_every_reader_skips_void_records(tmp_path: Path, kind: Kind) -> None:
    small = [rest for rest in NONSENSE.values() if len(rest) < 100_000]
    known, unknown = ([(key, rest) for rest in small] for key in (b"a", b"b"))
    await _agree(tmp_path, kind, known, [*unknown, *((None, rest) for rest in small)], 40)


async def _agree(
    folder: Path,
    kind: Kind,
    first: Sequence[tuple[bytes | None, bytes]],
    second: Sequence[tuple[bytes | None, bytes]],
    batch_records: int,
) -> None:
    rig = Rig(folder, kind)
    try:
        await rig.append("a", b"first")  # so that the head cache has the journal, and folds the records that follow
        for key, rest in first:
            await rig.write_raw(key, sealed(MAGIC, VERSION, rest))
        unreplicated = [await _state(rig, id) for id in IDS]
        assert [state[0] for state in unreplicated] == [_number(await _folded(rig, id)) for id in IDS]
        await rig.replicate(batch_records=batch_records)
        assert await _stored(rig) == [await _folded(rig, id) for id in IDS]
        assert [await _state(rig, id) for id in IDS] == unreplicated
        for key, rest in second:
            await rig.write_raw(key, sealed(MAGIC, VERSION, rest))
        both = [await _state(rig, id) for id in IDS]
        await rig.replicate(batch_records=batch_records)
        assert await _stored(rig) == [await _folded(rig, id) for id in IDS]
    finally:
        await rig.close()
    rig = Rig(folder, kind)
    try:
        assert [await _state(rig, id) for id in IDS] == both  # without a cache
        for id in IDS:
            await rig.append(id, b"last")
            await rig.journal.delete(id, to=2**53 - 1)
            await rig.replicate()
            assert (await _state(rig, id))[1] == []
            await rig.journal.purge(id)
            await rig.replicate()
            assert await _state(rig, id) == (None, [])
    finally:
        await rig.close()


async def _state(rig: Rig, id: str) -> tuple[int | None, Any]:
    """Return the journal's last number and its events; a damaged payload fails only the read."""
    number = await rig.journal.pointer(id)
    try:
        events: Any = [(event.seq_nr, repr(event.payload), event.tags) async for event in rig.journal.read(id)]
    except Corrupt:
        events = "a payload is damaged"
    return number, events


async def _stored(rig: Rig) -> list[Head | None]:
    return [await rig.store.head((await rig.journal._locate(id, create=True))[0]) for id in IDS]


async def _folded(rig: Rig, id: str) -> Head | None:
    """Return the state of the journal from the log alone."""
    config, head = await rig.journal.topic_config(), None
    for record in (await rig.log.read("orders", 0, start=0, stop=10**6, limit=10**6)).records:
        action = read_record(record.value, limit_bytes=config.limit_bytes)
        if record.key == id.encode() and not isinstance(action, Damaged):
            head, _ = fold(head, action, Position(config.epoch, record.offset), record.timestamp_ms, config)
    return head


def _number(head: Head | None) -> int | None:
    return head.seq_nr if head is not None and head.live else None
