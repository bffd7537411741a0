"""Wake-ups between threads and processes, the latter by loopback datagrams. They may get lost: waiters also poll."""

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

from tidebook.sqlite.listeners import SECRET_BYTES, Listeners

#: Minimum time between datagrams to other processes; pings in between are sent with the next one.
PING_S_MIN = 0.001
#: A waiter polls after this time even if it was not woken.
POLL_S = 1.0
#: Interval at which dead listeners are removed, and at which a failed attempt to listen is repeated.
_CHECK_S = 30.0
_DATAGRAM_BYTES_MAX = 8_000
_LOOPBACK = "127.0.0.1"

Waiter = tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]


class Wakeups:
    """The wake-ups of one folder, by channel.

    To miss no ping, a waiter first reads `count(channel)`, then checks for work, and if there is none calls `wait` with
    that count.
    """

    def __init__(self, folder: Path) -> None:
        self._listeners = Listeners(folder)
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._waiters: dict[str, list[Waiter]] = {}
        self._unsent: set[str] = set()
        self._sent_at = self._checked_at = self._listen_at = 0.0
        self._closed = False
        self._out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._out.setblocking(False)
        self._in: socket.socket | None = None
        self._port = 0
        self._file = -1
        _open_wakeups.add(self)

    def count(self, channel: str) -> int:
        """Return how many pings of the channel this process has received."""
        return self._counts.get(channel, 0)

    async def wait(self, channel: str, *, since: int, timeout_s: float = POLL_S) -> None:
        """Wait until the channel's count differs from `since`, or for `timeout_s` or POLL_S, whichever is shorter."""
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
            self._remove_waiter(channel, waiter)

    def ping(self, channels: Iterable[str]) -> None:
        """Wake the waiters of these channels: in this process now, in others at once or with the next `flush`."""
        self._wake_waiters(channels)
        with self._lock:
            self._unsent.update(channels)
        if time.monotonic() - self._sent_at >= PING_S_MIN:
            self.flush()

    def flush(self) -> None:
        """Send the pings that `ping` delayed. A thread that pings calls this when it becomes idle."""
        if not self._unsent:
            return
        with self._lock:
            unsent, self._unsent = self._unsent, set()
        now = self._sent_at = time.monotonic()
        if now - self._checked_at > _CHECK_S:
            self._checked_at = now
            self._listeners.check()
        ports = [port for port in self._listeners.ports() if port != self._port]
        if not ports:
            return
        for datagram in _datagrams(self._listeners.secret, unsent):
            for port in ports:
                try:
                    self._out.sendto(datagram, (_LOOPBACK, port))
                except OSError:  # the listener is gone, or its buffer is full and it will wake anyway
                    pass

    def close(self) -> None:
        """Stop listening and wake all waiters of this process."""
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
        _open_wakeups.discard(self)
        self._out.close()
        self._wake_waiters(list(self._waiters))

    def close_in_child(self) -> None:
        """In a forked child: close the inherited descriptors, and leave the parent's registration as it is."""
        for each in (self._in, self._out):
            if each is not None:
                each.close()
        if self._file >= 0:
            os.close(self._file)
        self._in, self._closed = None, True
        self._lock = threading.Lock()  # a thread that does not exist in the child may hold the old one

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
            except OSError:  # the disk is full, or there is no loopback: waiters poll until a later attempt succeeds
                listening.close()
                self._listen_at = time.monotonic() + _CHECK_S
                return
            self._port, self._in = port, listening
            self._thread = threading.Thread(target=self._receive, args=(listening,), name="wake-ups", daemon=True)
            self._thread.start()

    def _receive(self, listening: socket.socket) -> None:
        while True:
            datagram = listening.recv(_DATAGRAM_BYTES_MAX + SECRET_BYTES)
            if self._in is not listening:
                return
            if hmac.compare_digest(datagram[:SECRET_BYTES], self._listeners.secret):
                self._wake_waiters(datagram[SECRET_BYTES:].decode(errors="replace").split("\n"))

    def _wake_waiters(self, channels: Iterable[str]) -> None:
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

    def _remove_waiter(self, channel: str, waiter: Waiter) -> None:
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


_open_wakeups: weakref.WeakSet[Wakeups] = weakref.WeakSet()


def _after_fork() -> None:
    for wakeups in list(_open_wakeups):
        wakeups.close_in_child()
    _open_wakeups.clear()


os.register_at_fork(after_in_child=_after_fork)
