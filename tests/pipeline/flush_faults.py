"""Interrupt a flush at a given step: by an exception in the test's process, or by kill -9 in a separate driver."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from tests.pipeline.faults import die
from tidebook.pipeline.jobs.flush_wal import ParquetSink, flush_wal
from tidebook.wal.flush import FolderManifest, Range
from tidebook.wal.region import Region


class Patch(Protocol):
    """The signature of `setattr`, and of `setattr` of pytest's monkeypatch."""

    def __call__(self, target: Any, name: str, value: Any, /) -> None: ...


def end_at(step: str, end: Callable[[], None], patch: Patch) -> None:
    """Make the next flush call `end` at this step."""

    def after(kind: type, name: str) -> None:
        whole: Callable[..., Any] = getattr(kind, name)

        def ending(self: Any, *arguments: Any) -> None:
            whole(self, *arguments)
            end()

        patch(kind, name, ending)

    async def stage(self: Any, region: Region, ranges: Sequence[Range]) -> Sequence[str]:
        end()
        raise AssertionError("it should have ended")

    mark_deleted = Region.mark_deleted

    async def one_mark(self: Region, *arguments: Any, **named: Any) -> None:
        await mark_deleted(self, *arguments, **named)
        end()

    match step:
        case "before stage":
            patch(ParquetSink, "stage", stage)
        case "after stage":
            after(ParquetSink, "_write")
        case "after link":
            after(FolderManifest, "add")
        case "after publish":
            after(ParquetSink, "_commit")
        case "after one mark":
            patch(Region, "mark_deleted", one_mark)
        case _:
            raise ValueError(step)


def main() -> None:
    """`python -m tests.pipeline.flush_faults BOOK NAMESPACE OUTPUT STEP`."""
    where, namespace, output, step = sys.argv[1:]
    import tidebook
    from tidebook.pipeline.session import job_session
    from tidebook.runtime.blocking_portal import BlockingPortal

    portal = BlockingPortal()
    book = tidebook.open(where)
    portal.run(book.__aenter__())
    spark = job_session("tidebook fault", book.settings)
    end_at(step, die, setattr)
    flush_wal(spark, book, portal, namespace=namespace, output=Path(output))


if __name__ == "__main__":
    main()
