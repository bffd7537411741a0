"""The TCP proxy does to connections what its mode says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from faults.proxy import DELAY_S, TcpProxy

WAIT_S = 0.3


@pytest.fixture
async def proxy() -> AsyncIterator[TcpProxy]:
    """A proxy in front of a server that echoes its input."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1000):
                writer.write(data)
        except ConnectionError:
            pass
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    made = TcpProxy(server.sockets[0].getsockname()[:2])
    await made.start()
    yield made
    await made.close()
    server.close()


async def ask(proxy: TcpProxy, data: bytes, *, timeout_s: float = 5.0) -> bytes:
    reader, writer = await asyncio.open_connection(*proxy.address)
    try:
        writer.write(data)
        async with asyncio.timeout(timeout_s):
            return await reader.readexactly(len(data))
    finally:
        writer.close()


async def test_bytes_pass(proxy: TcpProxy) -> None:
    assert await ask(proxy, b"hello" * 1000) == b"hello" * 1000


async def test_a_delay_delays(proxy: TcpProxy) -> None:
    proxy.set_mode("delay")
    with pytest.raises(TimeoutError):
        await ask(proxy, b"hello", timeout_s=DELAY_S)
    assert await ask(proxy, b"hello") == b"hello"


async def test_a_drip_arrives_whole(proxy: TcpProxy) -> None:
    proxy.set_mode("drip")
    assert await ask(proxy, b"hello" * 20) == b"hello" * 20


@pytest.mark.parametrize("mode", ["drop", "reset"])
async def test_a_connection_is_reset(proxy: TcpProxy, mode: str) -> None:
    proxy.set_mode(mode)  # type: ignore[arg-type]
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await ask(proxy, b"x" * 500)
    proxy.set_mode("pass")
    assert await ask(proxy, b"again") == b"again"


@pytest.mark.parametrize("mode", ["one_way", "half_open"])
async def test_nothing_comes_back_and_the_connection_ends_with_the_fault(proxy: TcpProxy, mode: str) -> None:
    proxy.set_mode(mode)  # type: ignore[arg-type]
    reader, writer = await asyncio.open_connection(*proxy.address)
    writer.write(b"hello")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), WAIT_S)
    proxy.set_mode("pass")
    with pytest.raises(ConnectionError):
        await reader.readexactly(1)
    writer.close()
    assert await ask(proxy, b"again") == b"again"


async def test_a_server_that_is_away_resets(proxy: TcpProxy) -> None:
    proxy._target = ("127.0.0.1", 1)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await ask(proxy, b"x")


async def test_a_connection_that_has_ended_meanwhile_is_no_error(proxy: TcpProxy) -> None:
    """A transport forgets its socket only after its last callback, so that a writer may still be listed without one."""
    reader, writer = await asyncio.open_connection(*proxy.address)
    writer.write(b"hello")
    await reader.readexactly(5)
    listed = set(proxy._connections)
    assert len(listed) == 2
    for each in listed:
        each.get_extra_info("socket")._sock.close()
    proxy.set_mode("drop")
    writer.close()
    assert proxy.mode == "drop"
