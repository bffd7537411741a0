"""Wake-ups: directly within a process, by a datagram on the loopback between processes. A hint, never a promise."""

from __future__ import annotations

import asyncio
import hmac
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterable
from pathlib import Path

from tidebook.folder.listeners import SECRET_BYTES, Listeners

#: Datagrams to other processes are at least this far apart; what comes in between goes with the next one.
PING_S_LEAST = 0.001
#: Whoever waits looks for himself after this time, whether he was woken or not.
POLL_S = 1.0
#: How often the list of listeners is cleared of dead ones.
_CHECK_S = 30.0
_DATAGRAM_BYTES_MAX = 8_000
_LOOPBACK = "127.0.0.1"

Waiter = tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]


class Pings:
    """The wake-ups of one folder.

    Whoever waits first takes `count(channel)`, then looks whether there is something for him, and if there is
    not, waits for a count beyond it: so no ping can slip in between.
    """

    def __init__(self, folder: Path) -> None:
        self._listeners = Listeners(folder)
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._waiters: dict[str, list[Waiter]] = {}
        self._owed: set[str] = set()
        self._sent_at = self._checked_at = self._listen_at = 0.0
        self._closed = False
        self._out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._out.setblocking(False)
        self._in: socket.socket | None = None
        self._port = 0
        self._file = -1
        _open_pings.add(self)

    def count(self, channel: str) -> int:
        """How often the channel was pinged, as far as this process has heard."""
        return self._counts.get(channel, 0)

    async def wait(self, channel: str, *, since: int, timeout_s: float = POLL_S) -> None:
        """Wait until the channel's count is no longer `since`, for at most POLL_S: then look again."""
        self._listen()
        loop = asyncio.get_running_loop()
        waiter = (loop, loop.create_future())
        with self._lock:
            if self._counts.get(channel, 0) != since:
                return
            self._waiters.setdefault(channel, []).append(waiter)
        timer = loop.call_later(min(timeout_s, POLL_S), _wake, waiter[1])
        try:
            await waiter[1]
        finally:
            timer.cancel()
            self._forget(channel, waiter)

    def ping(self, channels: Iterable[str]) -> None:
        """Wake all who wait for these, in this process now and in others soon: `flush` sends what is held back."""
        self._ring(channels)
        with self._lock:
            self._owed.update(channels)
        if time.monotonic() - self._sent_at >= PING_S_LEAST:
            self.flush()

    def flush(self) -> None:
        """Send what `ping` held back. Called by a thread that pings, when it has nothing else to do."""
        if not self._owed:
            return
        with self._lock:
            owed, self._owed = self._owed, set()
        now = self._sent_at = time.monotonic()
        if now - self._checked_at > _CHECK_S:
            self._checked_at = now
            self._listeners.check()
        ports = [port for port in self._listeners.ports() if port != self._port]
        if not ports:
            return
        for datagram in _datagrams(self._listeners.secret, owed):
            for port in ports:
                try:
                    self._out.sendto(datagram, (_LOOPBACK, port))
                except OSError:  # a hint only: it is gone, or its buffer is full and it is awake anyway
                    pass

    def close(self) -> None:
        """Wake everybody for the last time and stop listening."""
        with self._lock:
            listening, self._in = self._in, None
            self._closed = True
        if listening is not None:
            self._listeners.leave(self._port, self._file)
            try:
                self._out.setblocking(True)
                self._out.sendto(b"", (_LOOPBACK, self._port))  # ends the listening thread
                self._thread.join()
            finally:
                listening.close()
        _open_pings.discard(self)
        self._out.close()
        self._ring(list(self._waiters))

    def leave_to_parent(self) -> None:
        """In a forked child: let go of the parent's sockets and of its entry in the list, which stays the parent's."""
        for each in (self._in, self._out):
            if each is not None:
                each.close()
        if self._file >= 0:
            os.close(self._file)
        self._in, self._closed = None, True

    def _listen(self) -> None:
        if self._port or time.monotonic() < self._listen_at:
            return
        with self._lock:
            if self._in is not None or self._closed:
                return
            listening = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            try:
                listening.bind((_LOOPBACK, 0))
                port = listening.getsockname()[1]
                self._file = self._listeners.join(port)
            except OSError:  # no room, no loopback: whoever waits polls until it can be had
                listening.close()
                self._listen_at = time.monotonic() + _CHECK_S
                return
            self._port, self._in = port, listening
            self._thread = threading.Thread(target=self._hear, args=(listening,), name="wake-ups", daemon=True)
            self._thread.start()

    def _hear(self, listening: socket.socket) -> None:
        while True:
            datagram = listening.recv(_DATAGRAM_BYTES_MAX + SECRET_BYTES)
            if self._in is not listening:
                return
            if hmac.compare_digest(datagram[:SECRET_BYTES], self._listeners.secret):
                self._ring(datagram[SECRET_BYTES:].decode(errors="replace").split("\n"))

    def _ring(self, channels: Iterable[str]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        with self._lock:
            for channel in channels:
                self._counts[channel] = self._counts.get(channel, 0) + 1
                for loop, future in self._waiters.pop(channel, ()):
                    by_loop.setdefault(loop, []).append(future)
        for loop, futures in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake, *futures)
            except RuntimeError:  # the loop is closed
                pass

    def _forget(self, channel: str, waiter: Waiter) -> None:
        with self._lock:
            waiters = self._waiters.get(channel)
            if waiters is not None and waiter in waiters:
                waiters.remove(waiter)
                if not waiters:
                    del self._waiters[channel]


def _wake(*futures: asyncio.Future[None]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def _datagrams(secret: bytes, channels: Iterable[str]) -> list[bytes]:
    datagrams, names, size = [], list[bytes](), 0
    for name in (channel.encode() for channel in channels):
        if size + len(name) + 1 > _DATAGRAM_BYTES_MAX:
            datagrams.append(secret + b"\n".join(names))
            names, size = [], 0
        names.append(name)
        size += len(name) + 1
    return [*datagrams, secret + b"\n".join(names)] if names else datagrams


_open_pings: weakref.WeakSet[Pings] = weakref.WeakSet()


def _after_fork() -> None:
    for pings in list(_open_pings):
        pings.leave_to_parent()
    _open_pings.clear()


os.register_at_fork(after_in_child=_after_fork)
