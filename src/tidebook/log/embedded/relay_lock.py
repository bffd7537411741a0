"""File locks by topic, for the outbox's relays of one machine."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from tidebook.core.key import topic_name
from tidebook.folder.failures import from_os


class RelayLocks:
    """A stopped process keeps its locks and an ended one does not: so nobody sends beside a late owner."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "outbox-locks"
        self._mine = threading.local()

    def take(self, topic: str) -> bool:
        """Take the lock for the calling thread, or find that it has it; False if somebody else does."""
        held = self._held()
        if topic in held:
            return True
        path = self._folder / f"{topic_name(topic)}.lock"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise from_os(error, path) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        held[topic] = file
        return True

    def release(self, topic: str) -> None:
        """Let go, if the calling thread has it."""
        file = self._held().pop(topic, None)
        if file is not None:
            os.close(file)

    def _held(self) -> dict[str, int]:
        held: dict[str, int] | None = getattr(self._mine, "held", None)
        if held is None:
            held = self._mine.held = {}
        return held
