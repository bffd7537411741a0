"""Handlers of snapshots."""

from __future__ import annotations

from tidebook.api.journals import SnapshotResponse
from tidebook.api.payload import payload_from, payload_to
from tidebook.core.errors import NotFound
from tidebook.core.key import Key
from tidebook.server.call import Call, Handler


async def load_snapshot(call: Call) -> SnapshotResponse:
    """Return the newest snapshot."""
    topic, id = call.parameters
    found = await call.book.journal(topic).load_snapshot(id, to=call.query.to)
    if found is None:
        raise NotFound(f"{Key(topic, id)}: there is no snapshot")
    mask = call.mask(topic)
    payload = found.payload if mask is None else mask(found.payload)
    return SnapshotResponse(found.seq_nr, found.timestamp_ms, *payload_to(payload))


async def save_snapshot(call: Call) -> None:
    """Save a snapshot."""
    topic, id, _ = call.parameters
    payload = payload_from(call.body.payload, call.body.payload_base64)
    await call.book.journal(topic).save_snapshot(id, seq_nr=call.number(2, "seq_nr"), payload=payload)


async def delete_snapshots(call: Call) -> None:
    """Delete snapshots."""
    topic, id = call.parameters
    await call.book.journal(topic).delete_snapshots(id, to=call.query.to)


HANDLERS: dict[str, Handler] = {
    "journals.load_snapshot": load_snapshot,
    "journals.save_snapshot": save_snapshot,
    "journals.delete_snapshots": delete_snapshots,
}
