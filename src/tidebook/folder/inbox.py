"""Operations on their way to the writer, and their outcomes on the way back: one call for all of a loop's turn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

import apsw

from tidebook.core.errors import TidebookError, Unavailable

#: Operations that may wait; more are refused, for whoever is that far ahead of the disk would fill the memory.
WAITING_MAX = 200_000


class Session:
    """What an operation works with inside the writer's transaction."""

    __slots__ = ("channels", "connection", "memory")

    def __init__(self, connection: apsw.Connection) -> None:
        self.connection = connection
        #: Read from the file earlier, still true: emptied when a transaction fails or another process has written.
        self.memory: dict[Any, Any] = {}
        #: Who is to be woken after the commit.
        self.channels: set[str] = set()


#: Carries out operations of one kind together: one outcome each, a value or an error. It may be run again after a
#: rollback, so it changes nothing outside of the session. What it raises fails that operation alone.
Run = Callable[[Session, Sequence[Any]], Sequence[Any]]
_Run = TypeVar("_Run", bound=Callable[..., Sequence[Any]])


def unsynced(run: _Run) -> _Run:
    """Marks operations that may be forgotten in a power cut: alone in a commit, they do not wait for the disk.

    What is committed after them never outlives them.
    """
    run.unsynced = True  # type: ignore[attr-defined]
    return run


#: Gets an outcome, a value or an exception, in the event loop that posted.
Done = Callable[[Any], None]
Item = tuple[Run, Any, Done, asyncio.AbstractEventLoop, int]
Answer = tuple[Item, Any]


class Inbox:
    """What is posted during one turn of an event loop is handed over at its end.

    If the first post woke the writer, the two threads would take the interpreter's lock from one another all along
    the turn, for commits of a few operations each.
    """

    def __init__(self) -> None:
        self._gathering: dict[asyncio.AbstractEventLoop, list[Item]] = {}
        self._handed: SimpleQueue[list[Item] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._closed = False

    def post(self, run: Run, argument: Any, done: Done, size_bytes: int) -> None:
        """Take an operation from the running event loop."""
        loop = asyncio.get_running_loop()
        items = self._gathering.get(loop)
        if items is None:
            items = self._gathering[loop] = []
            loop.call_soon(self._hand_over, loop)
        if self._waiting + len(items) >= WAITING_MAX:
            raise Unavailable(f"{WAITING_MAX:,} writes wait already: await some of them first")
        items.append((run, argument, done, loop, size_bytes))

    def empty(self) -> bool:
        """Whether nothing has been handed over."""
        return self._handed.empty()

    def take(self) -> list[Item] | None:
        """Wait for what is handed over next; None is the last."""
        items = self._handed.get()
        if items is not None:
            with self._lock:
                self._waiting -= len(items)
        return items

    def close(self) -> None:
        """Hand over what there is, and None behind it."""
        with self._lock:
            for items in list(self._gathering.values()):
                self._handed.put(items)
                self._waiting += len(items)
            self._gathering.clear()
            self._closed = True
            self._handed.put(None)

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            items = self._gathering.pop(loop, [])
            if items and not self._closed:
                self._handed.put(items)
                self._waiting += len(items)
                return
        closed: TidebookError = Unavailable("the file was closed before the write was begun")
        answer([(item, closed) for item in items])


def answer(answers: list[Answer]) -> None:
    """Hand outcomes over, with one call into each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Done, Any]]] = {}
    for item, outcome in answers:
        calls = by_loop.get(item[3])
        if calls is None:
            calls = by_loop[item[3]] = []
        calls.append((item[2], outcome))
    for loop, calls in by_loop.items():
        try:
            loop.call_soon_threadsafe(_call, loop, calls)
        except RuntimeError:  # the loop is closed: nobody is left who waits
            pass


def _call(loop: asyncio.AbstractEventLoop, calls: list[tuple[Done, Any]]) -> None:
    for done, outcome in calls:
        try:
            done(outcome)
        except Exception as error:  # one caller's mistake is not the next one's loss
            loop.call_exception_handler({"message": "a callback failed", "exception": error})


def nothing(session: Session, asked: Sequence[Any]) -> list[None]:
    """An operation that changes nothing: answered once all that was posted before it is done."""
    return [None] * len(asked)
