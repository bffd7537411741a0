"""Read and change the size of tag buckets, which may change while events are written."""

from __future__ import annotations

from tidebook.core.buckets import BUCKETS_SETTING, LEAD_MS, Buckets, decode_buckets, encode_buckets
from tidebook.core.errors import Unavailable
from tidebook.runtime.clock import Clock
from tidebook.store.port import StoreWriter
from tidebook.tags.horizon import read_horizon

ATTEMPTS_MAX = 10


async def read_buckets(store: StoreWriter) -> Buckets:
    """Return the history of bucket sizes."""
    text = await store.setting(BUCKETS_SETTING)
    return Buckets() if text is None else decode_buckets(text)


async def change_size(store: StoreWriter, clock: Clock, size: str) -> Buckets:
    """Change the bucket size from a time after everything that was written; return the new history.

    Replicators only write rows before `fixed_ms`, which they move by a compare-and-set of the same setting. So neither
    side overlooks the other, however long one of them is paused.
    """
    for _ in range(ATTEMPTS_MAX):
        text = await store.setting(BUCKETS_SETTING)
        before = Buckets() if text is None else decode_buckets(text)
        if before.changes[-1].size == size:
            return before
        horizon = await read_horizon(store)
        # Twice the lead: replicators of an older Tidebook fix nothing, and read the history every 15 s instead.
        from_ms = max(horizon.most_ms, clock.now_ms()) + 2 * LEAD_MS
        after = before.changed(size, from_ms=max(from_ms, before.fixed_ms, before.changes[-1].from_ms + LEAD_MS))
        if await store.set_setting(BUCKETS_SETTING, encode_buckets(after), expected=text):
            return after
    raise Unavailable(f"the size of buckets was changed concurrently {ATTEMPTS_MAX} times: try again")
