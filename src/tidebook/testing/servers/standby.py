"""Run a standby of a PostgreSQL server."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import ClassVar

from tidebook.testing.servers.postgres import USER, Postgres
from tidebook.testing.servers.server import Profile

#: The name under which a standby follows its primary, unless another is given.
STANDBY = "standby"
#: With these settings a commit waits until the standby has written it to disk.
PRIMARY_SETTINGS = {"synchronous_standby_names": STANDBY, "wal_level": "replica", "max_wal_senders": "4"}


class PostgresStandby(Postgres):
    """A standby on a copy of the data of a stopped primary; once started, it follows the primary."""

    name: ClassVar[str] = "postgres-standby"

    def __init__(self, folder: Path, primary: Postgres, follower: str = STANDBY, *, profile: Profile = "test") -> None:
        host, port = primary.address.split(":")
        conninfo = f"host={host} port={port} user={USER} application_name={follower}"
        super().__init__(folder, profile=profile, settings={"primary_conninfo": conninfo, "hot_standby": "on"})
        self._primary = primary

    def prepare(self) -> None:
        data = self._data()
        if (data / "PG_VERSION").exists():
            return
        shutil.copytree(self._primary._data(), data, dirs_exist_ok=True)
        (data / "standby.signal").touch()
        if identity := self.identity():
            for path in [data, *data.rglob("*")]:
                os.chown(path, identity["user"], identity["group"])

    def after_ready(self) -> None:
        """Create nothing, because the standby has all objects of the primary."""
