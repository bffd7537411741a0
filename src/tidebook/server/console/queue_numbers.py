"""How many entries a queue has in each state, counted up to a bound."""

from __future__ import annotations

import msgspec

from tidebook.queue.browse import BoundBrowser, EntryFilter
from tidebook.server.console.count import EXACT_MAX, Count


class QueueNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """How many entries a queue has in each state; above a bound the numbers are estimates."""

    queue: str
    due: Count
    later: Count
    processing: Count
    dead: Count
    #: Since when it is paused; None if it is not.
    paused_at_ms: int | None = None


async def count_queue(name: str, browser: BoundBrowser) -> QueueNumbers:
    """Count the entries of a queue by state, each up to a bound."""

    async def count(wanted: EntryFilter) -> Count:
        return _bounded(await browser.count_up_to(wanted, limit=EXACT_MAX + 1))

    return QueueNumbers(
        queue=name,
        due=await count(EntryFilter(state="due")),
        later=await count(EntryFilter(state="later")),
        processing=await count(EntryFilter(state="processing")),
        dead=_bounded(await browser.count_letters(limit=EXACT_MAX + 1)),
        paused_at_ms=await browser.paused_at(),
    )


def _bounded(found: int) -> Count:
    return Count(found) if found <= EXACT_MAX else Count(EXACT_MAX, exact=False)
