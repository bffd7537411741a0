"""The servers of a run: one that ends while it starts is started again."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import ClassVar

from faults.servers import RunServers
from tidebook.testing.servers.server import HOST, Server

FAILURES = 5
#: Ends at once for some starts, then listens.
PROGRAM = """
import pathlib, socket, sys
file, port = pathlib.Path(sys.argv[1]), int(sys.argv[2])
left = int(file.read_text())
file.write_text(str(left - 1))
if left > 0:
    sys.exit("nobody answers")
with socket.create_server(("127.0.0.1", port)) as listening:
    while True:
        listening.accept()[0].close()
"""


class ShyServer(Server):
    """A server that ends while it starts, several times."""

    name: ClassVar[str] = "shy"

    @property
    def url(self) -> str:
        return self.address

    def prepare(self) -> None:
        left = self.folder / "left"
        if not left.exists():
            left.write_text(str(FAILURES))

    def command(self) -> list[str]:
        return [sys.executable, "-c", PROGRAM, str(self.folder / "left"), str(self.ports["client"])]

    def probe(self) -> None:
        socket.create_connection((HOST, self.ports["client"])).close()


async def test_a_server_that_ends_while_it_starts_is_started_again(tmp_path: Path) -> None:
    servers = RunServers(tmp_path, cluster=False)
    node = servers.nodes["shy-1"] = ShyServer(tmp_path / "shy")
    try:
        await servers.restart("shy-1")
        assert node.alive()
        assert servers.failed_starts == {"shy-1": FAILURES}
    finally:
        await servers.close()
    assert not node.alive()
