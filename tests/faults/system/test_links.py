"""Links between processes: who has connected is known, and each direction can be cut."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from faults.links import LinkProxy

WAIT_S = 0.3
TIMEOUT_S = 20.0
#: A node that sends each line of its input, and prints what it gets.
NODE = """
import socket, sys, threading
found = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def receive():
    try:
        while data := found.recv(1000):
            print(data.decode(), flush=True)
    except ConnectionResetError:
        print("reset", flush=True)
threading.Thread(target=receive, daemon=True).start()
for line in sys.stdin:
    found.sendall(line.strip().encode())
"""


@pytest.fixture
async def proxy() -> AsyncIterator[LinkProxy]:
    """A proxy in front of node `b`, which echoes its input; this process is node `other`."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1000):
                received.append(data)
                writer.write(data)
        except ConnectionError:
            pass
        writer.close()

    received: list[bytes] = []
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    pids = {"other": os.getpid()}
    made = LinkProxy(server.sockets[0].getsockname()[:2], "b", lambda: pids)
    made.pids, made.received = pids, received  # type: ignore[attr-defined]
    await made.start()
    yield made
    await made.close()
    server.close()


async def node_of(proxy: LinkProxy, name: str) -> asyncio.subprocess.Process:
    node = await asyncio.create_subprocess_exec(
        sys.executable, "-c", NODE, str(proxy.address[1]), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    proxy.pids[name] = node.pid  # type: ignore[attr-defined]
    return node


async def say(node: asyncio.subprocess.Process, text: str) -> None:
    assert node.stdin is not None
    node.stdin.write(f"{text}\n".encode())
    await node.stdin.drain()


async def hear(node: asyncio.subprocess.Process, timeout_s: float = TIMEOUT_S) -> str:
    assert node.stdout is not None
    return (await asyncio.wait_for(node.stdout.readline(), timeout_s)).decode().strip()


@pytest.mark.parametrize("cut", [("a", "b"), ("b", "a")])
async def test_one_direction_of_one_link_is_cut(proxy: LinkProxy, cut: tuple[str, str]) -> None:
    node = await node_of(proxy, "a")
    reader, writer = await asyncio.open_connection(*proxy.address)  # from `other`, whose link is not cut
    await say(node, "one")
    assert await hear(node) == "one"
    proxy.cut([cut])
    await say(node, "two")
    with pytest.raises(TimeoutError):
        await hear(node, WAIT_S)
    assert (b"two" in proxy.received) == (cut == ("b", "a"))  # type: ignore[attr-defined]
    writer.write(b"three")
    assert await reader.readexactly(5) == b"three"
    proxy.cut([])
    assert await hear(node) == "reset"  # data was lost, so the connection cannot continue
    again = await node_of(proxy, "a")
    await say(again, "four")
    assert await hear(again) == "four"
    writer.close()
    for each in (node, again):
        each.kill()
        await each.wait()
