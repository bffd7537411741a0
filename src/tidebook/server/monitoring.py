"""Handlers of monitoring: the metrics of the process, and their history."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from tidebook.api.monitoring import HistoryResponse
from tidebook.server.call import Call, Handler
from tidebook.server.history import SAMPLE_EVERY_S, SERIES
from tidebook.server.responses import Text


async def metrics(call: Call) -> Text:
    """Return all metrics in the text format of Prometheus."""
    return Text(generate_latest(call.book.metrics.registry), CONTENT_TYPE_LATEST.encode())


async def history(call: Call) -> HistoryResponse:
    """Return the samples of the last six hours."""
    return HistoryResponse(SAMPLE_EVERY_S, list(SERIES), call.state.history.read(call.query.since_ms))


HANDLERS: dict[str, Handler] = {"monitoring.metrics": metrics, "monitoring.history": history}
