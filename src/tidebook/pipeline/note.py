"""The note that a running replication leaves of itself in the store, for `tidebook pipeline status`."""

from __future__ import annotations

import msgspec

from tidebook.wiring.book import Book

NOTE = "pipeline/replicate"


class Note(msgspec.Struct, frozen=True):
    """How a run stood when it was seen last."""

    at_ms: int
    batches: int
    records: int
    parked: int
    records_per_s: float
    batch_s: float
    #: Why a partition no longer moves, by topic/partition.
    stopped: dict[str, str] = {}


async def leave_note(book: Book, note: Note) -> None:
    """Leave a note; where another run leaves one at the same moment, its own serves as well."""
    before = await book.store.setting(NOTE)
    await book.store.set_setting(NOTE, msgspec.json.encode(note).decode(), expected=before)


async def read_note(book: Book) -> Note | None:
    """The note of the run that was seen last."""
    text = await book.store.setting(NOTE)
    return None if text is None else msgspec.json.decode(text, type=Note)
