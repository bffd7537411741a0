"""The peer huey: tasks on SQLite; every commit is synced."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

from huey import SqliteHuey

from bench.queue_sides.side import PAYLOAD


class Huey:
    """Tasks in a file, which threads execute as the workers of huey's consumer do."""

    name = "huey"

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tidebook-bench-")
        self._huey: Any = SqliteHuey(filename=str(Path(self._folder.name) / "huey.db"), fsync=True, results=False)
        self._task = self._huey.task(name="bench")(_nothing)

    def put(self, count: int) -> int:
        """Enqueue this many tasks."""
        for _ in range(count):
            self._task(PAYLOAD)
        return count

    def drain(self, *, threads: int) -> int:
        """Dequeue and execute all tasks."""
        done = [0] * threads

        def work(place: int) -> None:
            while (task := self._huey.dequeue()) is not None:
                self._huey.execute(task)
                done[place] += 1

        workers = [threading.Thread(target=work, args=(place,)) for place in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return sum(done)

    def close(self) -> None:
        """Remove the file."""
        self._huey.storage.close()
        self._folder.cleanup()


def _nothing(data: bytes) -> None:
    """Do nothing, as the work of a task."""
