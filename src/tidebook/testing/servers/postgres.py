"""Run one PostgreSQL server, whose user and database are both named tidebook, without a password on loopback."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import stat
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from tidebook.testing.servers.artifacts import postgres_home
from tidebook.testing.servers.errors import ServerError
from tidebook.testing.servers.ivy import cache_folder
from tidebook.testing.servers.server import HOST, NotReady, Profile, Server, exactly

USER = DATABASE = "tidebook"
ANSWER_S_MAX = 20
PROTOCOL = 196608  # 3.0
UNPRIVILEGED = "nobody"
ROOT_CACHE = Path("/var/cache/tidebook")


class Postgres(Server):
    """One PostgreSQL server on loopback. ``settings`` are added to its configuration, or replace values.

    PostgreSQL refuses to run as root. Started by root it runs as an unprivileged user, and if that user cannot reach
    the folder, its data is kept in a temporary folder that the folder's file ``location`` names.
    """

    name: ClassVar[str] = "postgres"
    stop_signal: ClassVar[signal.Signals] = signal.SIGINT  # SIGINT requests a fast shutdown

    def __init__(self, folder: Path, *, profile: Profile = "test", settings: Mapping[str, str] | None = None) -> None:
        super().__init__(folder, profile=profile)
        self._settings = {
            "listen_addresses": HOST,
            "unix_socket_directories": "",
            "max_connections": "200",
            "fsync": "on",
            **(settings or {}),
        }

    @property
    def url(self) -> str:
        return f"postgresql://{USER}@{self.address}/{DATABASE}"

    def prepare(self) -> None:
        data = self._data()
        if not (data / "PG_VERSION").exists():
            initdb = [str(self._home() / "bin" / "initdb"), "--pgdata", str(data), "--username", USER]
            self.run_tool(
                [*initdb, "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"],
                cwd=data,
                **self.identity(),
            )

    def command(self) -> list[str]:
        settings = self._settings | {"port": str(self.ports["client"])}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [str(self._home() / "bin" / "postgres"), "-D", str(self._data()), *options]

    def probe(self) -> None:
        self._connect("postgres").close()

    def after_ready(self) -> None:
        with self._connect("postgres") as connection:
            statement = f"CREATE DATABASE {DATABASE}".encode() + b"\0"
            connection.sendall(b"Q" + struct.pack(">i", len(statement) + 4) + statement)
            error = _until_ready(connection)
        if error and b"C42P04" not in error:  # the database exists already
            raise ServerError(f"postgres refused to create the database: {error!r}")

    def identity(self) -> dict[str, int]:
        if os.geteuid() != 0:
            return {}
        account = pwd.getpwnam(UNPRIVILEGED)
        return {"user": account.pw_uid, "group": account.pw_gid}

    def remove(self) -> None:
        self.stop()
        location = self.folder / "location"
        if location.exists():
            shutil.rmtree(location.read_text(), ignore_errors=True)
        super().remove()

    def _home(self) -> Path:
        """Return the folder of the programs; for root, a cache that the unprivileged user can read."""
        reachable = os.geteuid() != 0 or _is_world_accessible(cache_folder())
        return postgres_home(None if reachable else ROOT_CACHE)

    def _data(self) -> Path:
        location = self.folder / "location"
        if location.exists():
            return Path(location.read_text())
        self.folder.mkdir(parents=True, exist_ok=True)
        if os.geteuid() != 0 or _is_world_accessible(self.folder):
            data = self.folder / "data"
            data.mkdir(mode=0o700, exist_ok=True)
        else:
            data = Path(tempfile.mkdtemp(prefix="tidebook-postgres-"))
            location.write_text(str(data))
        if identity := self.identity():
            os.chown(data, identity["user"], identity["group"])
        return data

    def _connect(self, database: str) -> socket.socket:
        connection = socket.create_connection((HOST, self.ports["client"]), timeout=ANSWER_S_MAX)
        try:
            options = f"user\0{USER}\0database\0{database}\0\0".encode()
            connection.sendall(struct.pack(">ii", len(options) + 8, PROTOCOL) + options)
            if error := _until_ready(connection):
                raise NotReady(repr(error))
        except BaseException:
            connection.close()
            raise
        return connection


def _until_ready(connection: socket.socket) -> bytes | None:
    """Read messages until the server is ready for a query; return the error that it sent, if any."""
    error = None
    while True:
        kind, size = struct.unpack(">ci", exactly(connection, 5))
        body = exactly(connection, size - 4)
        match kind:
            case b"Z":
                return error
            case b"E" if b"VFATAL" in body:
                return body
            case b"E":
                error = body
            case _:
                pass


def _is_world_accessible(folder: Path) -> bool:
    """Return True if every existing folder of the path is accessible to any user."""
    existing = [path for path in (folder, *folder.parents) if path.exists()]
    return all(path.stat().st_mode & stat.S_IXOTH for path in existing)
