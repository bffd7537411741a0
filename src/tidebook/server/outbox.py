"""Handlers of the outbox."""

from __future__ import annotations

from tidebook.api.outbox import CountResponse, OutboxResponse, ParkedMessagesResponse
from tidebook.server.call import Call, Handler


async def status(call: Call) -> OutboxResponse:
    """Return the status of every topic."""
    return OutboxResponse(await call.book.outbox.status())


async def parked(call: Call) -> ParkedMessagesResponse:
    """List parked messages."""
    return ParkedMessagesResponse(await call.book.outbox.parked(call.query.topic, limit=call.query.limit))


async def retry(call: Call) -> CountResponse:
    """Retry parked messages."""
    return CountResponse(await call.book.outbox.parked_retry(call.body.topic, call.body.id))


async def drop(call: Call) -> CountResponse:
    """Delete parked messages."""
    return CountResponse(await call.book.outbox.parked_drop(call.body.topic, call.body.id))


HANDLERS: dict[str, Handler] = {
    "outbox.status": status,
    "outbox.parked": parked,
    "outbox.retry": retry,
    "outbox.drop": drop,
}
