"""File locks by topic: on one machine, only one outbox relay sends to a topic."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from tidebook.core.key import topic_name
from tidebook.sqlite.database import make_folder
from tidebook.sqlite.fair_lock import open_lock_file, take_lock
from tidebook.sqlite.forks import no_fork, open_objects


class RelayLocks:
    """The relay locks of this process.

    A suspended process keeps its locks, and a process that ends loses them: while the owner may still send, no other
    relay does.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "outbox-locks"
        #: The descriptors of the lock files, by the thread that holds the lock and the topic.
        self._held: dict[tuple[threading.Thread, str], int] = {}
        open_objects.add(self)

    def take(self, topic: str) -> bool:
        """Take the topic's lock for the calling thread; return False if another thread or process holds it."""
        holder = (threading.current_thread(), topic)
        if holder in self._held:
            return True
        with no_fork():
            make_folder(self._folder)
            file = open_lock_file(self._folder / f"{topic_name(topic)}.lock")
            if take_lock(file, timeout_s=0):
                self._held[holder] = file
                return True
            os.close(file)
        return False

    def release(self, topic: str) -> None:
        """Release the topic's lock, if the calling thread holds it."""
        with no_fork():
            file = self._held.pop((threading.current_thread(), topic), None)
            if file is not None:
                os.close(file)

    def close_in_child(self) -> None:
        """Close the descriptors in a forked child: a lock is held as long as any process has its file open."""
        for file in self._held.values():
            os.close(file)
        self._held.clear()
