"""Revisions of mends: each wins over those before it."""

from __future__ import annotations

from collections.abc import Iterable

from tidebook.core.mend import REV_MAX
from tidebook.store.port import StoreWriter


async def next_rev(store: StoreWriter, topics: Iterable[str]) -> int:
    """The revision under which these topics are mended: above those of all mends before, as long as there are any."""
    revs = [1]
    for topic in topics:
        name = f"rev/{topic}"
        while True:
            held = await store.setting(name)
            rev = min(int(held or 0) + 1, REV_MAX)
            if await store.set_setting(name, str(rev), expected=held):
                break
        revs.append(rev)
    return max(revs)
