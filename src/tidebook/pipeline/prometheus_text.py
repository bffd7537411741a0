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

    >>> print(exposition([Sample("pipeline_lag_records", (("topic", "orders"),), 3.0)]), end="")
    tidebook_pipeline_lag_records{topic="orders"} 3
    """
    lines = sorted(f"{PREFIX}{each.name}{_labels(each)} {each.value:.15g}" for each in samples)
    return "".join(f"{line}\n" for line in lines)


def _labels(sample: Sample) -> str:
    if not sample.labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in sample.labels) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


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
