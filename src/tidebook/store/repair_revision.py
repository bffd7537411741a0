"""Revisions of repairs: a repair with a higher revision overrides an earlier one at the same position of the log."""

from __future__ import annotations

from collections.abc import Iterable

from tidebook.core.repair import REV_MAX
from tidebook.store.port import StoreWriter


async def next_repair_revision(store: StoreWriter, topics: Iterable[str]) -> int:
    """Reserve and return a revision above those of all earlier repairs of these topics.

    After REV_MAX repairs of a topic every further one gets REV_MAX, and overrides an earlier one only at a later
    position of the log.
    """
    revs = [1]
    for topic in topics:
        name = f"rev/{topic}"
        while True:
            current = await store.setting(name)
            rev = min(int(current or 0) + 1, REV_MAX)
            if await store.set_setting(name, str(rev), expected=current):
                break
        revs.append(rev)
    return max(revs)
