"""Run a server: bind its socket, serve until it is asked to stop, then drain."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from tidebook.core.errors import InvalidInput, Unavailable
from tidebook.server.app import ServerApp
from tidebook.server.state import ServerState
from tidebook.wiring.book import Book

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8470
BACKLOG = 2_048


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return the fastest event loop that is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:  # it has no wheels for this platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class Tls:
    """The files of a TLS certificate and its key."""

    def __init__(self, cert_file: str, key_file: str) -> None:
        self.cert_file = cert_file
        self.key_file = key_file


async def serve(
    book: Book,
    stop: asyncio.Event,
    *,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    tls: Tls | None = None,
    where: str | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve a book until `stop` is set, then drain; `on_ready` is called with the URL once requests are accepted.

    `where` is the folder or file that the book was opened from, for jobs in child processes.
    """
    if not is_loopback(host):
        raise InvalidInput(f"{host} is not a loopback address: only 127.0.0.1, ::1 and localhost are served")
    state = ServerState(book, where=where)
    listening = _bind(host, port)
    settings = state.settings
    config = uvicorn.Config(
        ServerApp(state),
        http="httptools",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=round(settings.shutdown_s),
        limit_concurrency=settings.connections_max,
        backlog=BACKLOG,
    )
    server = _Server(config)
    scheme = "http" if tls is None else "https"
    address = listening.getsockname()
    name = f"[{address[0]}]" if ":" in address[0] else address[0]
    running = asyncio.create_task(server.serve([listening]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await _first_of(running, asyncio.create_task(server.accepting.wait()))
        if server.accepting.is_set():
            on_ready(f"{scheme}://{name}:{address[1]}")
            await _first_of(running, stopping)
            state.draining.set()
            if settings.drain_s and not running.done():
                await asyncio.wait((running,), timeout=settings.drain_s)
    finally:
        stopping.cancel()
        state.draining.set()
        server.should_exit = True
        try:
            await running
        finally:
            listening.close()
            await state.close()


class _Server(uvicorn.Server):
    """Uvicorn's server without its signal handlers: the caller has its own."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepting = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the caller."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept requests."""
        await super().startup(sockets)
        self.accepting.set()


async def _first_of(running: asyncio.Task[None], other: asyncio.Task[Any]) -> None:
    """Wait until the server ends or the other task does."""
    try:
        await asyncio.wait((running, other), return_when=asyncio.FIRST_COMPLETED)
    finally:
        other.cancel()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror}: choose another --port") from error
    return listening
