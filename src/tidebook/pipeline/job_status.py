"""The status that a running replication writes to the store, for `tidebook pipeline status`."""

from __future__ import annotations

import msgspec

from tidebook.wiring.book import Book

STATUS_SETTING = "pipeline/replicate"


class JobStatus(msgspec.Struct, frozen=True):
    """The last reported state of a replication run."""

    at_ms: int
    batches: int
    records: int
    parked: int
    records_per_s: float
    batch_s: float
    #: Why a partition is stopped, by topic/partition.
    stopped: dict[str, str] = {}


async def write_job_status(book: Book, status: JobStatus) -> None:
    """Write the status; if another run writes at the same moment, either status may win."""
    before = await book.store.setting(STATUS_SETTING)
    await book.store.set_setting(STATUS_SETTING, msgspec.json.encode(status).decode(), expected=before)


async def read_job_status(book: Book) -> JobStatus | None:
    """Return the status that was written last, or None if there is none."""
    text = await book.store.setting(STATUS_SETTING)
    return None if text is None else msgspec.json.decode(text, type=JobStatus)
