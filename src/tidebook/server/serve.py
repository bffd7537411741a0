"""Run a server: bind its socket, serve until it is asked to stop, then drain."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from tidebook.core.errors import InvalidInput, Unavailable
from tidebook.server.app import ServerApp
from tidebook.server.console.catalog import new_console
from tidebook.server.protocol import BoundedProtocol
from tidebook.server.state import ServerState
from tidebook.wiring.book import Book

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8470
BACKLOG = 2_048
#: For TLS 1.2; those of TLS 1.3 are always allowed. The default depends on the version of uvicorn, and was weaker.
TLS_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
#: How long an idle connection is kept.
KEEP_ALIVE_S = 75
#: How many new objects start a collection, and how many collections start one of the older generations.
GARBAGE_THRESHOLDS = (20_000, 20, 20)


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


def collect_garbage_rarely() -> None:
    """Exempt all current objects from garbage collection, and collect others rarely; for a process that only serves.

    Requests leave few reference cycles; at Python's thresholds, collections take a tenth of the time of requests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)


class Tls:
    """The files of a TLS certificate and its key."""

    def __init__(self, cert_file: str, key_file: str) -> None:
        for file in (cert_file, key_file):
            if not Path(file).is_file():
                raise InvalidInput(f"{file}: there is no such file")
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert_file, key_file)
        except (ssl.SSLError, OSError) as error:
            raise InvalidInput(f"{cert_file} and {key_file} are not a certificate and its key: {error}") from error
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

    Without tokens, only a loopback address is served; an address that others reach also needs TLS. `where` is the
    folder or file that the book was opened from, for jobs in child processes.
    """
    loopback = is_loopback(host)
    state = ServerState(book, host=host, loopback=loopback, tls=tls is not None, where=where)
    try:
        if not loopback:
            _require_security(state, host, tls)
        listening = _bind(host, port)
    except BaseException:
        await state.close()
        raise
    settings, console = state.settings, new_console(state)
    server = _Server(
        uvicorn.Config(
            ServerApp(state, pages=console.application()),
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=round(settings.shutdown_s),
            backlog=BACKLOG,
            ssl_certfile=None if tls is None else tls.cert_file,
            ssl_keyfile=None if tls is None else tls.key_file,
            ssl_ciphers=TLS_CIPHERS,
        ),
        send_s=settings.send_s,
    )
    state.connections = server.server_state.connections
    address = listening.getsockname()
    name = f"[{address[0]}]" if ":" in address[0] else address[0]
    state.start()
    running = asyncio.create_task(server.serve([listening]))
    stopping = asyncio.create_task(stop.wait())
    try:
        await _first_of(running, asyncio.create_task(server.accepting.wait()))
        if server.accepting.is_set():
            on_ready(f"{'http' if tls is None else 'https'}://{name}:{address[1]}")
            await _first_of(running, stopping)
            state.drain()
            if settings.drain_s and not running.done():
                await asyncio.wait((running,), timeout=settings.drain_s)
    finally:
        stopping.cancel()
        state.drain()
        server.should_exit = True
        try:
            await running
        finally:
            listening.close()
            await console.close()
            await state.close()


def _require_security(state: ServerState, host: str, tls: Tls | None) -> None:
    if tls is None:
        raise InvalidInput(f"{host} is reached by others: give --tls-cert and --tls-key, or serve 127.0.0.1")
    if not state.tokens.any:
        raise InvalidInput(f"{host} is reached by others: create a token first, with 'tidebook token create'")


class _Server(uvicorn.Server):
    """Uvicorn's server without its signal handlers: the caller has its own."""

    def __init__(self, config: uvicorn.Config, *, send_s: float) -> None:
        super().__init__(config)
        self.accepting = asyncio.Event()
        self._send_s = send_s

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the caller."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept requests."""
        await super().startup(sockets)
        self.accepting.set()

    async def on_tick(self, counter: int) -> bool:
        """Close connections whose clients send or accept too slowly; uvicorn calls this ten times a second."""
        if counter % 10 == 0:
            now_s = asyncio.get_running_loop().time()
            for each in list(self.server_state.connections):
                assert isinstance(each, BoundedProtocol)
                each.close_if_late(now_s, self._send_s)
        return await super().on_tick(counter)


async def _first_of(running: asyncio.Task[None], other: asyncio.Task[Any]) -> None:
    """Wait until the server or the other task ends; then cancel the other task."""
    try:
        await asyncio.wait((running, other), return_when=asyncio.FIRST_COMPLETED)
    finally:
        other.cancel()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol named, asyncio sets TCP_NODELAY: without that, responses wait 40 ms for an acknowledgement.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror}: choose another --port") from error
    return listening
