"""The processes that listen for wake-ups: a locked file each, named by its port. A file without a lock is stale."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from pathlib import Path

from tidebook.sqlite.errors import from_os

SECRET_BYTES = 16
_SECRET = "secret"
#: The resolution of file times: a tick of the kernel's clock.
_TICK_NS = 50_000_000


class Listeners:
    """The `listeners` folder of a book's folder.

    `secret` is shared by all processes that use the folder; it authenticates their datagrams.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "listeners"
        self._seen_ns = -1
        self._ports: tuple[int, ...] = ()
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
            fcntl.flock(file, fcntl.LOCK_EX)  # before the rename, so that no process takes it for stale
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
            changed_ns = self._folder.stat().st_mtime_ns
            if changed_ns != self._seen_ns:
                self._ports = tuple(
                    int(name) for name in os.listdir(self._folder) if name.isdigit() and self._live(name)
                )
                # A later change within the same tick would not change the time: list the folder again next time.
                if time.time_ns() - changed_ns > _TICK_NS:
                    self._seen_ns = changed_ns
        except OSError:  # the folder is being removed: there is no process to wake
            self._ports = ()
        return self._ports

    def check(self) -> None:
        """Make the next `ports` check every file, even if the folder has not changed."""
        self._seen_ns = -1

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
        path = self._folder / _SECRET
        lock = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                secret = path.read_bytes()
            except FileNotFoundError:
                secret = b""
            if len(secret) == SECRET_BYTES:
                return secret
            new = self._folder / f"new-{secrets.token_hex(8)}"
            secret = secrets.token_bytes(SECRET_BYTES)
            try:
                with open(new, "xb", opener=_private) as file:
                    file.write(secret)
                os.rename(new, path)  # replaces a truncated file, which a full disk may have left
            finally:
                new.unlink(missing_ok=True)
            return secret
        finally:
            os.close(lock)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
