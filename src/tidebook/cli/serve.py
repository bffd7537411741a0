"""`tidebook serve`: serve a book over HTTP until Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio

from tidebook.cli import output
from tidebook.cli.command import run, stop_loop_on_signals
from tidebook.cli.options import (
    PORT_MAX,
    BookOption,
    LogJsonOption,
    book_settings,
    is_address,
    number,
    option,
)
from tidebook.core.errors import InvalidInput
from tidebook.runtime.json_log import log_as_json
from tidebook.wiring.adapters import extra
from tidebook.wiring.book import Book
from tidebook.wiring.settings import DEFAULT_BOOK


def serve(
    book: BookOption,
    host: str = option("HOST", "The address to listen on.", "127.0.0.1"),
    port: int = number("The port; 0 chooses a free one.", 0, PORT_MAX, 8470, metavar="PORT"),
    tls_cert: str | None = option("FILE", "The TLS certificate, with its chain; needs --tls-key."),
    tls_key: str | None = option("FILE", "The key of the certificate."),
    log_json: LogJsonOption = False,
) -> None:
    """Serve a book over HTTP, until Ctrl-C or SIGTERM.

    A loopback address needs no token until one is created; any other address needs TLS and a token.
    The first signal ends streams and lets requests in flight finish; a second one exits immediately.
    """
    if is_address(book):
        raise InvalidInput(f"{book} is already served: pass the folder or the tidebook.toml of a book")
    if log_json:
        log_as_json()
    server = extra("tidebook.server.serve", "server")
    if (tls_cert is None) != (tls_key is None):
        raise InvalidInput("use --tls-cert and --tls-key together")
    tls = None if tls_cert is None else server.Tls(tls_cert, tls_key)

    def ready(url: str) -> None:
        output.emit({"url": url}, f"Tidebook is served at {url}. Press Ctrl-C to stop.")

    async def go() -> None:
        server.collect_garbage_rarely()
        stop = asyncio.Event()
        async with Book(book_settings(book, create=True)) as opened:
            with stop_loop_on_signals(stop.set):
                await server.serve(
                    opened,
                    stop,
                    host=host,
                    port=port,
                    tls=tls,
                    where=DEFAULT_BOOK if book is None else book,
                    on_ready=ready,
                )

    run(go(), loop_factory=server.new_event_loop)
