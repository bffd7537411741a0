"""A PostgreSQL that follows another one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tidebook.testing.servers import Postgres


class Standby(Postgres):
    """Made from a copy of a primary's data, while that is stopped; started, it follows the primary under its name."""

    def __init__(self, folder: Path, primary: Postgres, name: str) -> None:
        host, port = primary.address.split(":")
        follows = f"host={host} port={port} user=tidebook application_name={name}"
        super().__init__(folder, settings={"primary_conninfo": follows, "hot_standby": "on"})
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
        """What the primary has is here too."""
