"""Links between the nodes of a cluster: proxies of the nodes' internal ports, which can cut nodes off."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from faults.proxy import Mode, TcpProxy

#: The columns of /proc/net/tcp.
_LOCAL, _REMOTE, _INODE = 1, 2, 9

#: Returns the process ids of the running nodes, by name.
Pids = Callable[[], Mapping[str, int]]


class LinkProxy(TcpProxy):
    """Forwards what other nodes send to one port of a node, unless the link between the two is cut."""

    def __init__(self, target: tuple[str, int], node: str, pids: Pids) -> None:
        super().__init__(target)
        self._node = node
        self._pids = pids
        self._cut: frozenset[tuple[str, str]] = frozenset()
        self._has_lost = False

    def identify(self, writer: asyncio.StreamWriter) -> str | None:
        """Return the node that has connected. All nodes share one address: the process of the socket identifies it."""
        inodes = _inodes(writer.get_extra_info("peername")[1], self.address[1])
        for name, pid in self._pids().items():
            if inodes & _sockets(pid):
                return name
        return None

    def cut(self, links: Iterable[tuple[str, str]]) -> None:
        """Drop all data sent over these links, each from one node to another; without links, restore all of them.

        When links are restored, connections that have lost data are reset, because they cannot continue.
        """
        self._cut = frozenset(links)
        if not self._cut and self._has_lost:
            self.reset_all()
            self._has_lost = False

    def mode_of(self, peer: str | None, *, answers: bool) -> Mode:
        link = (self._node, peer) if answers else (peer, self._node)
        if link not in self._cut:
            return "pass"
        self._has_lost = True
        return "half_open"


def _inodes(local_port: int, remote_port: int) -> set[str]:
    """Return the sockets on this machine that are connected from one port to another; Java's are IPv6 sockets."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            ports = (int(fields[_LOCAL].rpartition(":")[2], 16), int(fields[_REMOTE].rpartition(":")[2], 16))
            if ports == (local_port, remote_port):
                found.add(f"socket:[{fields[_INODE]}]")
    return found


def _sockets(pid: int) -> set[str]:
    found = set()
    try:
        for each in os.scandir(f"/proc/{pid}/fd"):
            try:
                found.add(os.readlink(each.path))
            except OSError:  # the file was closed after it was listed
                continue
    except OSError:  # the process has ended
        return set()
    return found
