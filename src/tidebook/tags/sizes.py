"""The size of buckets, which may change while events come."""

from __future__ import annotations

from tidebook.core.buckets import BUCKETS_SETTING, LEAD_MS, Buckets, decode_buckets, encode_buckets
from tidebook.core.clock import Clock
from tidebook.core.errors import Unavailable
from tidebook.store.port import StoreWriter
from tidebook.tags.horizon import read_horizon

ATTEMPTS_MAX = 10


async def read_buckets(store: StoreWriter) -> Buckets:
    """The history of sizes."""
    text = await store.setting(BUCKETS_SETTING)
    return Buckets() if text is None else decode_buckets(text)


async def change_size(store: StoreWriter, clock: Clock, size: str) -> Buckets:
    """Give buckets another size from a moment ahead of all that was written; the history afterwards.

    What replicators write is below the time up to which they have fixed the history. They do that by comparing and
    setting the same text, so neither overlooks the other, however long one of them is paused.
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
    raise Unavailable(f"the size of buckets was changed by others {ATTEMPTS_MAX} times meanwhile: try again")
