"""Wake-ups between threads and processes, the latter by loopback datagrams. They may get lost: waiters also poll."""

from __future__ import annotations

import asyncio
import fcntl
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from tidebook.sqlite.errors import from_os
from tidebook.sqlite.forks import open_objects

#: Minimum time between datagrams to other processes; pings in between are sent with the next one.
PING_S_MIN = 0.001
#: A waiter polls after this time even if it was not woken.
POLL_S = 1.0
#: Interval at which a failed attempt to listen is repeated.
_LISTEN_S = 30.0
#: The maximum number of channels in a datagram. Their names have a topic of at most 200 characters.
_CHANNELS_MAX = 30
_DATAGRAM_BYTES_MAX = 8_000
_LOOPBACK = "127.0.0.1"
_SECRET_BYTES = 16

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
        self._waiters: dict[str, set[Waiter]] = {}
        self._unsent: set[str] = set()
        self._sent_at = self._listen_at = 0.0
        self._closed = False
        self._out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._out.setblocking(False)
        self._in: socket.socket | None = None
        self._port = 0
        self._file = -1
        open_objects.add(self)

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
            self._waiters.setdefault(channel, set()).add(waiter)
        timer = loop.call_later(min(timeout_s, POLL_S), _wake, waiter[1])
        try:
            await waiter[1]
        finally:
            timer.cancel()
            with self._lock:
                waiters = self._waiters.get(channel, set())
                waiters.discard(waiter)
                if not waiters:
                    self._waiters.pop(channel, None)

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
        self._sent_at = time.monotonic()
        ports = [port for port in self._listeners.ports() if port != self._port]
        channels = list(unsent) if ports else []
        for first in range(0, len(channels), _CHANNELS_MAX):
            datagram = self._listeners.secret + "\n".join(channels[first : first + _CHANNELS_MAX]).encode()
            for port in ports:
                try:
                    self._out.sendto(datagram, (_LOOPBACK, port))
                except OSError:  # the listener has ended, or its buffer is full and it will wake anyway
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
        open_objects.discard(self)
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
                self._listen_at = time.monotonic() + _LISTEN_S
                return
            self._port, self._in = port, listening
            self._thread = threading.Thread(target=self._receive, args=(listening,), name="wake-ups", daemon=True)
            self._thread.start()

    def _receive(self, listening: socket.socket) -> None:
        while True:
            datagram = listening.recv(_DATAGRAM_BYTES_MAX + _SECRET_BYTES)
            if self._in is not listening:
                return
            if hmac.compare_digest(datagram[:_SECRET_BYTES], self._listeners.secret):
                self._wake_waiters(datagram[_SECRET_BYTES:].decode(errors="replace").split("\n"))

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


class Listeners:
    """The processes that listen: a locked file each, named by its port. A file without a lock is stale.

    `secret` is shared by all processes that use the folder; it authenticates their datagrams.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "listeners"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self.secret = self._read_secret()
        except OSError as error:
            raise from_os(error, self._folder) from error

    def join(self, port: int) -> int:
        """Register a port and return a file descriptor, which must stay open while the process listens."""
        new = self._folder / f"new-{secrets.token_hex(8)}"
        file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)  # before the rename, so that no process considers it stale
            os.rename(new, self._folder / str(port))
        except OSError:
            os.close(file)
            raise
        return file

    def leave(self, port: int, file: int) -> None:
        """Unregister a port."""
        (self._folder / str(port)).unlink(missing_ok=True)
        os.close(file)

    def ports(self) -> tuple[int, ...]:
        """Return the ports of live listeners, and remove stale ones."""
        try:
            return tuple(int(name) for name in os.listdir(self._folder) if name.isdigit() and self._live(name))
        except OSError:  # the folder is being removed: there is no process to wake
            return ()

    def _live(self, name: str) -> bool:
        path = self._folder / name
        try:
            file = os.open(path, os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(file)
        return False

    def _read_secret(self) -> bytes:
        """Read or create the secret, under a lock: processes with different secrets would ignore one another."""
        path = self._folder / "secret"
        lock = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                secret = path.read_bytes()
            except FileNotFoundError:
                secret = b""
            if len(secret) == _SECRET_BYTES:
                return secret
            secret = secrets.token_bytes(_SECRET_BYTES)
            path.unlink(missing_ok=True)  # it was cut off by a full disk or a crash
            with open(path, "xb", opener=partial(os.open, mode=0o600)) as file:
                file.write(secret)
            return secret
        finally:
            os.close(lock)


def _wake(*futures: asyncio.Future[None]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
