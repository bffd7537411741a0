"""File locks by topic: on one machine, only one outbox relay sends to a topic."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from tidebook.core.key import topic_name
from tidebook.sqlite.errors import from_os
from tidebook.sqlite.forks import no_fork, open_objects


class RelayLocks:
    """The relay locks of this process.

    A process that is stopped keeps its locks, and one that has ended does not: so while a late owner may still send, no
    other relay does.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "outbox-locks"
        self._local = threading.local()
        self._open: set[int] = set()
        open_objects.add(self)

    def take(self, topic: str) -> bool:
        """Take the topic's lock for the calling thread; return False if another thread or process holds it."""
        held = self._held()
        if topic in held:
            return True
        with no_fork():
            file = self._lock(self._folder / f"{topic_name(topic)}.lock")
            if file is None:
                return False
            held[topic] = file
            self._open.add(file)
        return True

    def release(self, topic: str) -> None:
        """Release the topic's lock, if the calling thread holds it."""
        file = self._held().pop(topic, None)
        if file is not None:
            with no_fork():
                self._open.discard(file)
                os.close(file)

    def _lock(self, path: Path) -> int | None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise from_os(error, path) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return None
        return file

    def close_in_child(self) -> None:
        """In a forked child: close the descriptors, since a lock lasts while any process has one of it open."""
        for file in self._open:
            os.close(file)
        self._open.clear()
        self._local = threading.local()

    def _held(self) -> dict[str, int]:
        held: dict[str, int] | None = getattr(self._local, "held", None)
        if held is None:
            held = self._local.held = {}
        return held
