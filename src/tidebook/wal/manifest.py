"""The manifest of a flush: a folder of numbered files, of which the last one counts.

Each holds all that was ever committed, and the files that it adds with their places before and after. A number is
taken by linking a finished file to its name, which only one can do.
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
from tidebook.wal.flush import Life, Range

VERSION = 1
#: Manifests that stay behind the last one.
KEPT = 10


class Move(msgspec.Struct, frozen=True):
    """A file on its way from the staging folder to where readers look, both relative to the output folder."""

    staged: str
    final: str


class Manifest(msgspec.Struct, frozen=True):
    """What every manifest says: its place in the row, and the files that it adds."""

    version: int
    number: int
    moves: tuple[Move, ...] = ()


class Commit(Manifest, frozen=True):
    """One manifest of a flush."""

    #: Table, life and last number of all that was ever committed.
    reached: tuple[tuple[int, int, int], ...] = ()
    #: Whose entries these are: offsets and table ids of another region may be the same.
    source: str = ""

    @property
    def committed(self) -> dict[Life, int]:
        return {Life(table, life): last for table, life, last in self.reached}


def next_commit(last: Commit, ranges: Sequence[Range], moves: Sequence[Move]) -> Commit:
    """The manifest after `last` that adds these ranges."""
    reached = last.committed
    for each in ranges:
        before = reached.get(Life(each.table, each.life), 0)
        if before >= each.first:
            raise Conflict(key=f"table {each.table}", expected=each.first - 1, found=before)
        reached[Life(each.table, each.life)] = each.last
    flat = tuple((key.table, key.life, number) for key, number in sorted(reached.items()))
    return Commit(VERSION, last.number + 1, tuple(moves), flat, last.source)


M = TypeVar("M", bound=Manifest)


class FolderManifest(Generic[M]):
    """The manifests of one kind in a folder of the local machine."""

    def __init__(self, output: Path, name: str, kind: type[M]) -> None:
        self._output = output
        self._folder = output / "_tidebook" / name
        self._kind = kind

    def last(self) -> M:
        """The manifest in force."""
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
        """Put a manifest in force. Raises Conflict where its number is taken."""
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
        """Move the files of the manifest in force to their places, as far as they are not there yet."""
        folders = set()
        for move in self.last().moves:
            staged, final = self._output / move.staged, self._output / move.final
            if staged.exists():  # else it was published, and may have gone its own way since
                final.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):  # another one publishes at the same time, and was quicker
                    os.replace(staged, final)
            if final.parent.exists():  # whoever moved it: it must be durable before anything is marked
                folders.add(final.parent)
        for folder in folders:
            _sync(folder)

    def prune(self) -> None:
        """Remove manifests that nobody needs."""
        for number in self._numbers()[:-KEPT]:
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
