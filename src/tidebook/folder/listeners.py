"""Who listens on this machine: a locked file for each, named by its port. A file that nobody locks is stale."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from pathlib import Path

from tidebook.folder.failures import from_os

SECRET_BYTES = 16
_SECRET = "secret"
#: Times of files are no finer than a tick of the kernel's clock.
_TICK_NS = 50_000_000


class Listeners:
    """The `listeners` folder beside the files of a book."""

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
        """Register a port; the file that is returned must stay open for as long as it listens."""
        new = self._folder / f"new-{secrets.token_hex(8)}"
        file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)  # before it has its name, so that nobody takes it for stale
            os.rename(new, self._folder / str(port))
        except OSError:
            os.close(file)
            raise
        return file

    def leave(self, port: int, file: int) -> None:
        """Take a port off the list."""
        (self._folder / str(port)).unlink(missing_ok=True)
        os.close(file)

    def ports(self) -> tuple[int, ...]:
        """The ports that are listened to, stale ones cleared away."""
        try:
            changed_ns = self._folder.stat().st_mtime_ns
            if changed_ns != self._seen_ns:
                self._ports = tuple(
                    int(name) for name in os.listdir(self._folder) if name.isdigit() and self._live(name)
                )
                # One that joined within the same tick of the clock would not show: such a list is looked at again.
                if time.time_ns() - changed_ns > _TICK_NS:
                    self._seen_ns = changed_ns
        except OSError:  # the folder is being removed: there is nobody to wake
            self._ports = ()
        return self._ports

    def check(self) -> None:
        """Look at every file again, not only when the list has changed."""
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
        """One at a time: processes with different secrets would never hear one another."""
        path = self._folder / _SECRET
        turn = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(turn, fcntl.LOCK_EX)
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
                os.rename(new, path)  # over what a full disk had cut off, if that is there
            finally:
                new.unlink(missing_ok=True)
            return secret
        finally:
            os.close(turn)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
