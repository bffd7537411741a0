"""Make disks fail for the files of an embedded book: a full file system, and writes and syncs that fail."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

#: The usual size of the file system, far more than a run needs.
SIZE_BYTES = 2 << 30
#: The space that is left free in a full file system: the first of these with which it can be resized.
SPARE_BYTES = (0, 1 << 14, 1 << 16, 1 << 18, 1 << 20)
_CLONE_NEWNS = 0x00020000
#: The probability that a write or a sync fails while the disk of a process is faulty.
FAILURE = 0.3
#: The signals at which the disk of a process begins to fail, and ends.
FAIL_SIGNAL, HEAL_SIGNAL = signal.SIGRTMIN, signal.SIGRTMIN + 1


class SmallDisk:
    """A file system in memory below one folder, which only this process and those that it starts see."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def mount(cls, folder: Path) -> SmallDisk | None:
        """Mount the file system; return None if that is not allowed. Call it before any thread or process starts."""
        libc = ctypes.CDLL(None, use_errno=True)
        if not hasattr(libc, "unshare") or libc.unshare(_CLONE_NEWNS) != 0:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        # Otherwise other processes would see this mount too.
        private = subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True, check=False)
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "tidebook", str(folder)],
            capture_output=True, check=False,
        )  # fmt: skip
        return cls(folder) if private.returncode == mounted.returncode == 0 else None

    def fill(self) -> None:
        """Shrink the file system until almost no space is free."""
        for spare_bytes in SPARE_BYTES:
            stats = os.statvfs(self._folder)
            with suppress(subprocess.CalledProcessError):  # more was written since the size was read
                self._resize((stats.f_blocks - stats.f_bfree) * stats.f_frsize + spare_bytes)
                return

    def make_room(self) -> None:
        """Give the file system its full size again."""
        self._resize(SIZE_BYTES)

    def _resize(self, size_bytes: int) -> None:
        subprocess.run(
            ["mount", "-o", f"remount,size={size_bytes}", str(self._folder)], check=True, capture_output=True
        )


def install_faulty_files(chance: random.Random) -> FaultyDisk:
    """Make SQLite use files whose writes can fail; call before anything opens a database."""
    import apsw

    disk, base = FaultyDisk(chance), apsw.vfs_names()[0]

    class Files(apsw.VFS):
        def xOpen(self, name: apsw.URIFilename | str | None, flags: list[int]) -> apsw.VFSFile:
            return File(base, name, flags)

    class File(apsw.VFSFile):
        def xWrite(self, data: bytes, offset: int) -> None:
            disk.fail_sometimes(apsw.SQLITE_IOERR_WRITE)
            super().xWrite(data, offset)

        def xSync(self, flags: int) -> None:
            disk.fail_sometimes(apsw.SQLITE_IOERR_FSYNC)
            super().xSync(flags)

        def xTruncate(self, newsize: int) -> None:
            disk.fail_sometimes(apsw.SQLITE_IOERR_TRUNCATE)
            super().xTruncate(newsize)

    disk.files = Files("faulty", base, makedefault=True)
    return disk


class FaultyDisk:
    """Decides which calls of this process's files fail."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.is_faulty = False
        #: The VFS, which must exist for as long as SQLite uses it.
        self.files: object = None

    def fail_sometimes(self, code: int) -> None:
        """Raise the error of a code, with some probability, while the disk is faulty."""
        import apsw

        if self.is_faulty and self._chance.random() < FAILURE:
            raise apsw.exception_for(code)
