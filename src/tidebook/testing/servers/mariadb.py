"""Run one MariaDB server, whose user and database are both named tidebook, without a password on loopback."""

from __future__ import annotations

import getpass
import socket
from pathlib import Path
from typing import ClassVar

from tidebook.testing.servers.artifacts import mariadb_home
from tidebook.testing.servers.server import HOST, NotReady, Server, exactly

USER = DATABASE = "tidebook"
ANSWER_S_MAX = 20
PROTOCOL = 10

FIRST_STATEMENTS = f"""\
CREATE DATABASE IF NOT EXISTS {DATABASE} CHARACTER SET utf8mb4;
CREATE USER IF NOT EXISTS '{USER}'@'{HOST}';
GRANT ALL PRIVILEGES ON *.* TO '{USER}'@'{HOST}';
"""


class MariaDb(Server):
    """One MariaDB server on loopback."""

    name: ClassVar[str] = "mariadb"

    @property
    def url(self) -> str:
        return f"mysql://{USER}@{self.address}/{DATABASE}"

    def prepare(self) -> None:
        (self.folder / "first.sql").write_text(FIRST_STATEMENTS)
        if not (self._data() / "mysql").exists():
            home = mariadb_home()
            scripts = [home / "scripts" / "mariadb-install-db", home / "bin" / "mariadb-install-db"]
            [install, *_] = [script for script in scripts if script.exists()]
            self.run_tool(
                [
                    str(install),
                    "--no-defaults",
                    f"--basedir={home}",
                    f"--datadir={self._data()}",
                    f"--user={getpass.getuser()}",
                    "--auth-root-authentication-method=normal",
                    "--skip-test-db",
                ]
            )

    def command(self) -> list[str]:
        home = mariadb_home()
        programs = [home / "bin" / "mariadbd", home / "sbin" / "mariadbd"]
        [program, *_] = [program for program in programs if program.exists()]
        return [
            str(program),
            "--no-defaults",
            f"--basedir={home}",
            f"--datadir={self._data()}",
            f"--user={getpass.getuser()}",
            f"--bind-address={HOST}",
            f"--port={self.ports['client']}",
            f"--socket={self._socket()}",
            f"--pid-file={self.folder / 'mariadbd.pid'}",
            f"--init-file={self.folder / 'first.sql'}",
            "--skip-name-resolve",
            "--skip-ssl",  # otherwise it generates a key at each start, which takes seconds
            "--innodb-buffer-pool-size=64M",
            "--performance-schema=OFF",
        ]

    def probe(self) -> None:
        """Read the server's greeting, which begins with the protocol version."""
        with socket.create_connection((HOST, self.ports["client"]), timeout=ANSWER_S_MAX) as connection:
            greeting = exactly(connection, 5)
        if greeting[4] != PROTOCOL:
            raise NotReady(f"unexpected greeting {greeting!r}")

    def _data(self) -> Path:
        return self.folder / "data"

    def _socket(self) -> str:
        """Return a short socket name: the full path could exceed the maximum length of a socket path."""
        return f"@tidebook-{self.ports['client']}"
