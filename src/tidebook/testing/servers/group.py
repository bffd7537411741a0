"""All servers of a home folder: started in parallel, listed in a status file, and stopped together."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

from tidebook.testing.servers.cassandra import Cassandra
from tidebook.testing.servers.cluster import CLUSTER_KINDS, ServerCluster
from tidebook.testing.servers.errors import ServerError
from tidebook.testing.servers.ivy import locked
from tidebook.testing.servers.kafka import Kafka
from tidebook.testing.servers.mariadb import MariaDb
from tidebook.testing.servers.postgres import Postgres
from tidebook.testing.servers.server import Profile, Server

KINDS: dict[str, type[Server]] = {kind.name: kind for kind in (Kafka, Cassandra, Postgres, MariaDb)}
NAMES = tuple(KINDS)
CLUSTER_NAMES = tuple(CLUSTER_KINDS)


class ServerGroup:
    """The servers in one home folder, whichever process started them; with `cluster`, a cluster of each kind."""

    def __init__(
        self,
        home: Path,
        *,
        profile: Profile = "test",
        cluster: bool = False,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.home = home.resolve() / "cluster" if cluster else home.resolve()
        self._kinds: Mapping[str, type[Server] | type[ServerCluster]] = CLUSTER_KINDS if cluster else KINDS
        self._profile: Profile = profile
        self._report = report

    @property
    def status_file(self) -> Path:
        """Return the JSON file with addresses and processes, from which tests find the servers."""
        return self.home / "status.json"

    @property
    def book_file(self) -> Path:
        """Return the settings file of a book that uses these servers."""
        return self.home / "tidebook.toml"

    def running(self) -> dict[str, Server | ServerCluster]:
        """Return the running servers by name."""
        servers = {
            name: kind(self.home / name, profile=self._profile)
            for name, kind in self._kinds.items()
            if (self.home / name).exists()
        }
        return {name: server for name, server in servers.items() if server.adopt()}

    def status(self) -> dict[str, Any]:
        """Return the addresses and processes of the running servers, and the book file that uses them."""
        servers = {name: server.describe() for name, server in self.running().items()}
        return {"servers": servers, "book": str(self.book_file) if servers else None}

    def start(self, names: Iterable[str] = NAMES) -> None:
        """Start the servers that are not running, in parallel.

        If one fails, raise its error and keep the others running; an interrupt kills those being started.
        """
        with self._locked():
            running = self.running()
            wanted = {
                name: self._kinds[name](self.home / name, profile=self._profile)
                for name in names
                if name not in running
            }
            failures = _start_all(wanted.values(), self._report)
            self._write(running | {name: server for name, server in wanted.items() if server.alive()})
        if failures:
            raise ServerError("\n".join(failures))

    def stop(self, names: Iterable[str] = NAMES, *, remove: bool = False) -> list[str]:
        """Stop the running servers, delete their data if `remove`, and return their names."""
        with self._locked():
            running = self.running()
            known = {
                name: running.get(name) or self._kinds[name](self.home / name)
                for name in names
                if (self.home / name).exists()
            }
            with ThreadPoolExecutor(len(KINDS)) as pool:
                list(pool.map(lambda server: server.remove() if remove else server.stop(), known.values()))
            self._write({name: server for name, server in running.items() if name not in known})
        return [name for name in known if name in running]

    def _locked(self) -> Any:
        return locked(self.home / "lock")

    def _write(self, running: Mapping[str, Server | ServerCluster]) -> None:
        servers = {name: running[name].describe() for name in self._kinds if name in running}
        _replace(self.status_file, json.dumps({"servers": servers}, indent=2) + "\n")
        sections = {"log": "kafka", "store": "cassandra", "sql": "postgres"}
        book = [
            f'[{section}]\nurl = "{servers[name]["url"]}"\n' for section, name in sections.items() if name in servers
        ]
        _replace(self.book_file, "\n".join(book))


def _start_all(servers: Iterable[Server | ServerCluster], report: Callable[[str], None]) -> list[str]:
    """Start servers in parallel and return the errors."""
    cancelled = Event()

    def start(server: Server | ServerCluster) -> None:
        began = time.monotonic()
        server.start()
        if cancelled.is_set():
            server.kill9()
        else:
            report(f"{server.name} at {server.address} after {time.monotonic() - began:.1f} s")

    failures = []
    with ThreadPoolExecutor(len(KINDS)) as pool:
        starts = {server: pool.submit(start, server) for server in servers}
        try:
            for server, started in starts.items():
                try:
                    started.result()
                except ServerError as error:
                    failures.append(f"{server.name}: {error}")
        except BaseException:
            cancelled.set()
            for server in starts:
                server.kill9()
            raise
    return failures


def _replace(file: Path, text: str) -> None:
    """Write a file atomically."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(file)
