"""Handlers of the outbox."""

from __future__ import annotations

from tidebook.api.outbox import CountAnswer, OutboxAnswer, ParkedMessagesAnswer
from tidebook.server.call import Call, Handler


async def status(call: Call) -> OutboxAnswer:
    """Return the status of every topic."""
    return OutboxAnswer(await call.book.outbox.status())


async def parked(call: Call) -> ParkedMessagesAnswer:
    """List parked messages."""
    return ParkedMessagesAnswer(await call.book.outbox.parked(call.query.topic, limit=call.query.limit))


async def retry(call: Call) -> CountAnswer:
    """Retry parked messages."""
    return CountAnswer(await call.book.outbox.parked_retry(call.body.topic, call.body.id))


async def drop(call: Call) -> CountAnswer:
    """Delete parked messages."""
    return CountAnswer(await call.book.outbox.parked_drop(call.body.topic, call.body.id))


HANDLERS: dict[str, Handler] = {
    "outbox.status": status,
    "outbox.parked": parked,
    "outbox.retry": retry,
    "outbox.drop": drop,
}
