"""Counts that stop at a bound, so that no page counts all of a large queue or outbox; and the counts of a queue."""

from __future__ import annotations

from typing import Final

import msgspec

from tidebook.queue.browse import BoundBrowser, EntryFilter

#: Counting stops above this.
EXACT_MAX: Final = 10_000


class Count(msgspec.Struct, frozen=True):
    """A number of things; if it is not exact, there are more than `value`."""

    value: int
    exact: bool = True

    def __str__(self) -> str:
        return f"{self.value:,}" if self.exact else f"over {self.value:,}"


class QueueNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """How many entries a queue has in each state, each counted up to a bound."""

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
