"""A TCP gate in front of a server: connections pass through it until it is shut."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType


class TcpGate:
    """Listens on a separate port, in a separate event loop, and forwards connections to the server."""

    def __init__(self, server: str) -> None:
        host, port = server.split(":")
        self._server = (host, int(port))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._passing: set[asyncio.StreamWriter] = set()
        self._is_open = True

    def __enter__(self) -> TcpGate:
        self._thread.start()
        listening = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._pass, "127.0.0.1", 0), self._loop)
        self._listener = listening.result(10)
        self.address = f"127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def open(self) -> None:
        """Let connections pass again."""
        self._is_open = True

    def shut(self) -> None:
        """Cut off all connections; new ones are cut off at once."""
        self._is_open = False
        self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        for writer in self._passing:
            writer.transport.abort()

    async def _end(self) -> None:
        self._listener.close()
        self._cut()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._is_open:
            writer.transport.abort()
            return
        onward_reader, onward = await asyncio.open_connection(*self._server)
        self._passing |= {writer, onward}
        try:
            await asyncio.gather(_copy(reader, onward), _copy(onward_reader, writer))
        finally:
            self._passing -= {writer, onward}
            writer.transport.abort()
            onward.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass  # cut off
    finally:
        writer.close()
