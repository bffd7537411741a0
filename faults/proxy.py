"""A TCP proxy that delays, drops, resets, discards or slows down the data that passes through it."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Literal

Mode = Literal["pass", "delay", "drop", "reset", "one_way", "half_open", "drip"]
MODES: tuple[Mode, ...] = ("delay", "drop", "reset", "one_way", "half_open", "drip")
CHUNK_BYTES = 65_536
DELAY_S = 0.3
#: A connection is reset after this many bytes, in the middle of a frame.
RESET_AFTER_BYTES = 100
DRIP_BYTES, DRIP_S = 16, 0.02


class TcpProxy:
    """Forwards connections to one address, in the current mode."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self.mode: Mode = "pass"

    @property
    def address(self) -> tuple[str, int]:
        """The address that clients connect to."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen on a loopback address, by default on a free port."""
        self._server = await asyncio.start_server(self._serve, host, port)

    async def close(self) -> None:
        """Stop listening and reset every connection."""
        assert self._server is not None
        self._server.close()
        self.reset_all()
        await self._server.wait_closed()

    def set_mode(self, mode: Mode) -> None:
        """Change the mode; entering `drop`, or leaving `half_open` or `one_way`, resets all open connections.

        A connection that has lost bytes cannot continue.
        """
        before, self.mode = self.mode, mode
        if mode == "drop" or before in ("half_open", "one_way"):
            self.reset_all()

    def reset_all(self) -> None:
        """Reset every connection."""
        for writer in list(self._connections):
            _reset(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.mode == "drop":
            _reset(writer)
            return
        try:
            to_reader, to_writer = await asyncio.open_connection(*self._target)
        except OSError:
            _reset(writer)
            return
        self._connections |= {writer, to_writer}
        peer = self.identify(writer)
        try:
            await asyncio.gather(
                self._forward(reader, to_writer, peer, answers=False),
                self._forward(to_reader, writer, peer, answers=True),
            )
        except OSError:
            pass
        finally:
            self._connections -= {writer, to_writer}
            for each in (writer, to_writer):
                each.close()

    def identify(self, writer: asyncio.StreamWriter) -> str | None:
        """Return the name of the peer that has connected, if the proxy distinguishes peers."""
        return None

    def mode_of(self, peer: str | None, *, answers: bool) -> Mode:
        """Return the mode for bytes from a peer, or for the responses to it."""
        return "half_open" if self.mode == "one_way" and answers else self.mode

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str | None, *, answers: bool
    ) -> None:
        sent = 0
        while data := await reader.read(CHUNK_BYTES):
            mode = self.mode_of(peer, answers=answers)
            if mode == "half_open":
                continue
            if mode == "delay":
                await asyncio.sleep(DELAY_S)
            elif mode == "reset" and sent + len(data) > RESET_AFTER_BYTES:
                writer.write(data[: max(1, len(data) // 2)])
                self.reset_all()
                return
            elif mode == "drip":
                for start in range(0, len(data), DRIP_BYTES):
                    writer.write(data[start : start + DRIP_BYTES])
                    await writer.drain()
                    if self.mode == "drip":
                        await asyncio.sleep(DRIP_S)
                continue
            writer.write(data)
            await writer.drain()
            sent += len(data)
        if writer.can_write_eof():
            writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection with RST instead of FIN; do nothing if it is closed."""
    found = writer.get_extra_info("socket")
    if found is not None and found.fileno() >= 0:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
