"""Flush a region to files exactly once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import pytest_asyncio

from tests.integration.wal.base import contents, make_wal
from tidebook.core.errors import Conflict
from tidebook.log.sqlite import SqliteLog
from tidebook.wal.flush import (
    Commit,
    FolderManifest,
    Move,
    Range,
    TableIncarnation,
    flush_region,
    next_commit,
    plan_flush,
)
from tidebook.wal.region import Region
from tidebook.wal.wal import Wal

STEPS = ("committed", "stage", "staged", "commit", "linked", "published")


class Crash(Exception):
    """Raised in place of a crash of the process."""


class FileSink:
    """Write JSON lines to one folder for each table; raise `Crash` at a chosen step."""

    def __init__(self, output: Path, *, crash_at: str | None = None) -> None:
        self._output = output
        self._manifest = FolderManifest(output, "region=7", Commit)
        self._crash_at = crash_at

    def _step(self, name: str) -> None:
        assert name in STEPS
        if name == self._crash_at:
            raise Crash(name)

    async def committed(self) -> Mapping[TableIncarnation, int]:
        self._step("committed")
        self._manifest.publish()
        return self._manifest.last().committed

    async def stage(self, region: Region, ranges: Sequence[Range]) -> Sequence[str]:
        self._step("stage")
        files = []
        for each in ranges:
            path = self._output / "_staging" / f"{each.table}-{each.incarnation}-{each.first}-{each.last}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [
                json.dumps([e.seq, e.payload.decode()])
                async for e in region.read_table(each.table, start=each.first)
                if e.seq <= each.last
            ]
            path.write_text("\n".join(lines) + "\n")
            files.append(str(path.relative_to(self._output)))
        self._step("staged")
        return files

    async def commit(self, ranges: Sequence[Range], files: Sequence[str]) -> None:
        self._step("commit")
        moves = [Move(file, f"table={r.table}/{Path(file).name}") for r, file in zip(ranges, files, strict=True)]
        self._manifest.add(next_commit(self._manifest.last(), ranges, moves))
        self._step("linked")
        self._manifest.publish()
        self._step("published")


def flushed(output: Path) -> dict[int, list[list[object]]]:
    """Return the entries that a reader of the files sees."""
    held: dict[int, list[list[object]]] = {}
    for path in sorted(output.glob("table=*/*.jsonl"), key=lambda p: int(p.name.split("-")[2])):
        held.setdefault(int(path.parent.name.split("=")[1]), []).extend(map(json.loads, path.read_text().splitlines()))
    return held


@pytest_asyncio.fixture
async def log(tmp_path: Path) -> AsyncIterator[SqliteLog]:
    log = SqliteLog(tmp_path / "book")
    yield log
    await log.close()


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest_asyncio.fixture
async def owner(log: SqliteLog) -> Region:
    return await make_wal(log, "f").open_region(7, create=True)


@pytest.fixture
def flusher(log: SqliteLog) -> Wal:
    return make_wal(log, "f")


async def test_a_table_created_again_during_a_flush_keeps_its_new_entries(
    owner: Region, flusher: Wal, output: Path
) -> None:
    class Slow(FileSink):
        async def stage(self, region: Region, ranges: Sequence[Range]) -> Sequence[str]:
            files = await super().stage(region, ranges)
            await owner.drop_table(1)
            await owner.write(1, [b"new-1", b"new-2", b"new-3"])
            return files

    await owner.write(1, [b"a", b"b"])
    await flush_region(await flusher.open_region(7, writable=False), Slow(output))
    assert await contents(owner) == {1: [(1, b"new-1"), (2, b"new-2"), (3, b"new-3")]}


async def test_a_flush_writes_every_entry_once_then_marks(owner: Region, flusher: Wal, output: Path) -> None:
    await owner.write_many([(1, [b"a", b"b"]), (2, [b"c"])])
    done = await flush_region(await flusher.open_region(7, writable=False), FileSink(output))
    assert done.entries == 3
    assert flushed(output) == {1: [[1, "a"], [2, "b"]], 2: [[1, "c"]]}
    await owner.write(1, [b"d"])
    assert await contents(owner) == {1: [(3, b"d")]}
    await flush_region(await flusher.open_region(7, writable=False), FileSink(output))
    assert flushed(output) == {1: [[1, "a"], [2, "b"], [3, "d"]], 2: [[1, "c"]]}


async def test_a_flush_of_nothing_changes_nothing(owner: Region, flusher: Wal, output: Path) -> None:
    assert (await flush_region(await flusher.open_region(7, writable=False), FileSink(output))).ranges == ()
    assert not output.exists()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("writes_between", [False, True])
async def test_a_crash_at_any_step_loses_and_duplicates_nothing(
    owner: Region, flusher: Wal, output: Path, step: str, writes_between: bool
) -> None:
    await owner.write_many([(1, [b"a", b"b"]), (2, [b"c"])])
    reader = await flusher.open_region(7, writable=False)
    with pytest.raises(Crash):
        await flush_region(reader, FileSink(output, crash_at=step))
    expected: dict[int, list[list[object]]] = {1: [[1, "a"], [2, "b"]], 2: [[1, "c"]]}
    if writes_between:
        await owner.write(1, [b"d"])
        expected[1].append([3, "d"])
    await flush_region(reader, FileSink(output))
    assert flushed(output) == expected
    assert await contents(reader) == {}


async def test_a_table_created_again_is_flushed_from_its_first_number(
    owner: Region, flusher: Wal, output: Path
) -> None:
    reader = await flusher.open_region(7, writable=False)
    await owner.write(1, [b"old", b"older"])
    await flush_region(reader, FileSink(output))
    await owner.drop_table(1)
    await owner.write(1, [b"new"])
    done = await flush_region(reader, FileSink(output))
    assert [(r.first, r.last) for r in done.ranges] == [(1, 1)]
    assert sorted(str(text) for _, text in flushed(output)[1]) == ["new", "old", "older"]


async def test_one_of_two_concurrent_flushes_conflicts(owner: Region, flusher: Wal, output: Path) -> None:
    await owner.write(1, [b"a"])
    reader = await flusher.open_region(7, writable=False)
    slow, quick = FileSink(output), FileSink(output)
    ranges = plan_flush(reader.meta, await slow.committed())
    files = await slow.stage(reader, ranges)
    await flush_region(reader, quick)
    with pytest.raises(Conflict):
        await slow.commit(ranges, files)
    assert flushed(output) == {1: [[1, "a"]]}


async def test_a_flush_may_be_bounded(owner: Region, flusher: Wal, output: Path) -> None:
    await owner.write(1, [b"%d" % n for n in range(10)])
    reader = await flusher.open_region(7, writable=False)
    counts = [(await flush_region(reader, FileSink(output), entries_max=4)).entries for _ in range(4)]
    assert counts == [4, 4, 2, 0]
    assert [seq for seq, _ in flushed(output)[1]] == list(range(1, 11))


async def test_a_flush_reads_the_manifest_once_before_and_once_after(owner: Region, flusher: Wal, output: Path) -> None:
    asked: list[str] = []

    class Counted(FileSink):
        async def committed(self) -> Mapping[TableIncarnation, int]:
            asked.append("committed")
            return await super().committed()

        async def stage(self, region: Region, ranges: Sequence[Range]) -> Sequence[str]:
            asked.append("stage")
            return await super().stage(region, ranges)

    await owner.write(1, [b"a"])
    await flush_region(await flusher.open_region(7, writable=False), Counted(output))
    assert asked == ["committed", "stage", "committed"]


def test_a_manifest_can_be_published_concurrently(output: Path) -> None:
    moves = tuple(Move(f"_tidebook/staging/{n}", f"table={n % 5}/{n}") for n in range(400))
    for move in moves:
        (output / move.staged).parent.mkdir(parents=True, exist_ok=True)
        (output / move.staged).write_text("x")
    manifest = FolderManifest(output, "region=7", Commit)
    manifest.add(Commit(1, 1, moves))
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(FolderManifest(output, "region=7", Commit).publish) for _ in range(8)]:
            done.result()
    assert all((output / move.final).exists() for move in moves)


def test_only_one_of_many_commits_a_number(output: Path) -> None:
    def add(_: int) -> bool:
        try:
            FolderManifest(output, "region=7", Commit).add(Commit(1, 1))
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(add, range(8))) == 1
