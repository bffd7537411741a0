"""Create and sync folders so that they survive a power failure."""

from __future__ import annotations

import os
from pathlib import Path

from tidebook.sqlite.errors import from_os


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents durably; raise InvalidInput if the path cannot be used as a folder."""
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            sync_folders(folder)
    except OSError as error:
        raise from_os(error, folder) from error


def sync_folders(folder: Path) -> None:
    """Sync a folder and its parents on the same device: a directory entry is durable once its folder is synced.

    All parents are synced, since a process that was killed may have created some of them without syncing them.
    """
    device = folder.stat().st_dev
    for parent in (folder, *folder.absolute().parents):
        if parent.stat().st_dev != device:
            return
        try:
            sync(parent)
        except PermissionError:  # this user cannot have created a folder that it may not read
            return


def sync(path: Path) -> None:
    """Sync a folder or a file. Nothing else in this process may have the file open: closing it drops POSIX locks."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
