"""Metrics in Prometheus' text format, and a small HTTP server that exposes them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tidebook.core.errors import InvalidInput, Unavailable
from tidebook.runtime.metrics import Metrics, Sample

PREFIX = "tidebook_"
PORT_MAX = 65_535
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def to_prometheus_text(samples: Iterable[Sample]) -> str:
    """Return samples in Prometheus' text format.

    >>> print(to_prometheus_text([Sample("pipeline_lag_records", (("topic", "orders"),), 3.0)]), end="")
    tidebook_pipeline_lag_records{topic="orders"} 3
    """
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    lines = []
    for each in samples:
        labels = ",".join(f'{name}="{value.translate(escapes)}"' for name, value in each.labels)
        lines.append(f"{PREFIX}{each.name}{f'{{{labels}}}' if labels else ''} {each.value:.15g}\n")
    return "".join(sorted(lines))


@contextmanager
def serve_metrics(metrics: Metrics, address: str) -> Iterator[int]:
    """Serve GET /metrics at host:port and yield the port; port 0 lets the system choose one."""
    host, _, port = address.rpartition(":")
    if not port.isascii() or not port.isdecimal() or int(port) > PORT_MAX:
        raise InvalidInput(f"metrics are served at HOST:PORT, for example 127.0.0.1:9401, not at {address!r}")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.split("?")[0] != "/metrics":
                self.send_error(404)
                return
            body = to_prometheus_text(metrics.samples()).encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    try:
        server = ThreadingHTTPServer((host or "127.0.0.1", int(port)), Handler)
    except OSError as error:
        raise Unavailable(f"metrics cannot be served at {address}: {error.strerror or error}") from error
    thread = threading.Thread(target=server.serve_forever, name="tidebook-metrics", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
