"""Flush a region's entries to files exactly once: stage, commit in a manifest, publish, mark deleted.

The manifest decides. Files that are staged but not committed are ignored and staged again; if a flush crashes after the
commit, the next one publishes and marks. The region is opened with `writable=False`, so its owner keeps writing.

A folder has numbered manifests, the last of which is in force. A new one is committed by hard-linking a finished file
to the next number, which succeeds for one process only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar
from uuid import uuid4

import msgspec

from tidebook.core.errors import Conflict, Corrupt, NotFound, UnknownVersion
from tidebook.wal.meta import RegionMeta
from tidebook.wal.region import Region

VERSION = 1
#: How many manifests `prune` keeps, including the one in force.
MANIFESTS_KEPT = 10


class TableIncarnation(NamedTuple):
    """A table between its creation and its drop; `incarnation` is the offset of the record that created the table."""

    table: int
    incarnation: int


class Range(msgspec.Struct, frozen=True):
    """Entries of one incarnation of a table: sequence numbers `first` to `last`, inclusive."""

    table: int
    incarnation: int
    first: int
    last: int

    @property
    def count(self) -> int:
        """The number of entries."""
        return self.last - self.first + 1


class Sink(Protocol):
    """The destination of a flush. Every step may be repeated after a crash."""

    async def committed(self) -> Mapping[TableIncarnation, int]:
        """Publish the committed files, and return the last committed sequence number of each table."""
        ...

    async def stage(self, region: Region, ranges: Sequence[Range]) -> Sequence[str]:
        """Write the entries to files that no reader sees yet; return the file names."""
        ...

    async def commit(self, ranges: Sequence[Range], files: Sequence[str]) -> None:
        """Commit the ranges and their files atomically; raise `Conflict` if another flush committed first."""
        ...


class Flushed(msgspec.Struct, frozen=True):
    """The result of a flush."""

    region: int
    ranges: tuple[Range, ...]

    @property
    def entries(self) -> int:
        """The number of entries flushed."""
        return sum(each.count for each in self.ranges)


def plan_flush(
    meta: RegionMeta, committed: Mapping[TableIncarnation, int], *, entries_max: int | None = None
) -> list[Range]:
    """Return the ranges of entries that the region has and the manifest has not, up to `entries_max` for each table."""
    ranges = []
    for table, each in sorted(meta.tables.items()):
        first = max(each.mapping.start, committed.get(TableIncarnation(table, each.incarnation), 0) + 1)
        last = each.next_seq_num - 1 if entries_max is None else min(each.next_seq_num, first + entries_max) - 1
        if first <= last:
            ranges.append(Range(table, each.incarnation, first, last))
    return ranges


async def flush_region(region: Region, sink: Sink, *, entries_max: int | None = None) -> Flushed:
    """Move a region's entries into the sink, then mark them deleted; a crash loses and duplicates nothing."""
    await region.refresh()
    committed = await sink.committed()
    await _mark(region, committed)
    ranges = plan_flush(region.meta, committed, entries_max=entries_max)
    if ranges:
        files = await sink.stage(region, ranges)
        await sink.commit(ranges, files)
        await _mark(region, await sink.committed())
    return Flushed(region.id, tuple(ranges))


async def _mark(region: Region, committed: Mapping[TableIncarnation, int]) -> None:
    """Mark the entries that the manifest has committed and the region has not marked deleted yet."""
    for table, each in sorted(region.meta.tables.items()):
        last = committed.get(TableIncarnation(table, each.incarnation), 0)
        if last >= max(1, each.latest_marked_deleted):
            with suppress(NotFound):  # the table was dropped meanwhile
                await region.mark_deleted(table, last + 1, incarnation=each.incarnation)


class Move(msgspec.Struct, frozen=True):
    """The staged and the final path of a file, both relative to the output folder."""

    staged: str
    final: str


class Manifest(msgspec.Struct, frozen=True):
    """The fields of every manifest: the format version, its number, and the files that it adds."""

    version: int
    number: int
    moves: tuple[Move, ...] = ()


class Commit(Manifest, frozen=True):
    """The manifest of a flush."""

    #: Table, incarnation and last sequence number of everything ever committed.
    reached: tuple[tuple[int, int, int], ...] = ()
    #: The region that the entries are from; offsets and table ids are unique only within a region.
    source: str = ""

    @property
    def committed(self) -> dict[TableIncarnation, int]:
        """The last committed sequence number of each table incarnation."""
        return {TableIncarnation(table, incarnation): last for table, incarnation, last in self.reached}


def next_commit(last: Commit, ranges: Sequence[Range], moves: Sequence[Move]) -> Commit:
    """Return the manifest that follows `last` and adds these ranges; raise `Conflict` if one is already committed."""
    reached = last.committed
    for each in ranges:
        before = reached.get(TableIncarnation(each.table, each.incarnation), 0)
        if before >= each.first:
            remedy = "another flush has committed these entries: run the flush again"
            raise Conflict(key=f"table {each.table}", expected=each.first - 1, found=before, remedy=remedy)
        reached[TableIncarnation(each.table, each.incarnation)] = each.last
    flat = tuple((key.table, key.incarnation, number) for key, number in sorted(reached.items()))
    return Commit(VERSION, last.number + 1, tuple(moves), flat, last.source)


M = TypeVar("M", bound=Manifest)


class FolderManifest(Generic[M]):
    """The manifests of one type in a local folder."""

    def __init__(self, output: Path, name: str, kind: type[M]) -> None:
        self._output = output
        self._folder = output / "_tidebook" / name
        self._kind = kind

    def last(self) -> M:
        """Return the manifest in force; raise `Corrupt` or `UnknownVersion` if it cannot be read."""
        numbers = self._numbers()
        if not numbers:
            return self._kind(VERSION, 0)
        path = self._path(numbers[-1])
        try:
            commit = msgspec.json.decode(path.read_bytes(), type=self._kind)
        except msgspec.MsgspecError as error:
            raise Corrupt(f"{path}: the manifest is damaged: {error}") from error
        if commit.version != VERSION:
            raise UnknownVersion(f"{path}: the manifest", version=commit.version, known=VERSION)
        return commit

    def add(self, commit: M) -> None:
        """Commit a manifest durably; raise `Conflict` if its number is taken."""
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = self._folder / f"draft-{uuid4().hex}"
        with draft.open("wb") as file:
            file.write(msgspec.json.encode(commit))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, self._path(commit.number))
        except FileExistsError as error:
            raise Conflict(
                key=str(self._folder), expected=commit.number - 1, found=self._numbers()[-1], counted="manifest",
                remedy="another job has committed in between: run this one again",
            ) from error  # fmt: skip
        finally:
            draft.unlink()
        _sync(self._folder)

    def publish(self) -> None:
        """Move the files of the manifest in force to their final paths, except those moved before."""
        folders = set()
        for move in self.last().moves:
            staged, final = self._output / move.staged, self._output / move.final
            if staged.exists():  # otherwise it was published earlier, and a reader may have moved or removed it
                final.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):  # another process published it just now
                    os.replace(staged, final)
            if final.parent.exists():  # also if another process published it: that must be durable before a mark
                folders.add(final.parent)
        for folder in folders:
            _sync(folder)

    def prune(self) -> None:
        """Delete all but the newest manifests."""
        for number in self._numbers()[:-MANIFESTS_KEPT]:
            self._path(number).unlink(missing_ok=True)

    def _numbers(self) -> list[int]:
        return sorted(int(path.stem) for path in self._folder.glob("[0-9]*.json"))

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:012}.json"


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
