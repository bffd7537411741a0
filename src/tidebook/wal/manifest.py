"""Manifests: a folder of numbered files, the last of which is in force.

A manifest of a flush lists everything ever committed, and the files it adds with their staged and final paths. A new
manifest is committed by hard-linking a finished file to the next number, which succeeds for one process only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar
from uuid import uuid4

import msgspec

from tidebook.core.errors import Conflict, Corrupt, UnknownVersion
from tidebook.wal.flush import Range, TableIncarnation

VERSION = 1
#: How many manifests `prune` keeps, including the one in force.
MANIFESTS_KEPT = 10


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
        before = reached.get(TableIncarnation(each.table, each.life), 0)
        if before >= each.first:
            raise Conflict(key=f"table {each.table}", expected=each.first - 1, found=before)
        reached[TableIncarnation(each.table, each.life)] = each.last
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
            raise Conflict(key=str(self._folder), expected=commit.number - 1, found=self._numbers()[-1]) from error
        finally:
            draft.unlink()
        _sync(self._folder)

    def publish(self) -> None:
        """Move the files of the manifest in force to their final paths, except those moved before."""
        folders = set()
        for move in self.last().moves:
            staged, final = self._output / move.staged, self._output / move.final
            if staged.exists():  # else it is published already, and a reader may have moved or removed it
                final.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):  # another process published it just now
                    os.replace(staged, final)
            if final.parent.exists():  # sync even if another process moved it: it must be durable before a mark
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
