"""Handlers of monitoring: the metrics of the process."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from tidebook.server.answers import Text
from tidebook.server.call import Call, Handler


async def metrics(call: Call) -> Text:
    """Return all metrics in the text format of Prometheus."""
    return Text(generate_latest(call.book.metrics.registry), CONTENT_TYPE_LATEST.encode())


HANDLERS: dict[str, Handler] = {"monitoring.metrics": metrics}
