"""`tidebook pipeline verify` and `rebuild`: compare the store with the log, or rebuild it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tidebook.cli import output
from tidebook.cli.options import BookOption, JsonOption, TopicArgument, TopicsOption
from tidebook.cli.pipeline_session import open_job_book, session

if TYPE_CHECKING:
    from tidebook.pipeline.jobs.verify import VerifyResult
    from tidebook.replication.journal_state import Difference


def verify(
    topics: Annotated[
        list[str] | None, typer.Argument(metavar="TOPIC", help="The topics; by default all topics.")
    ] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Repair the store from the log.")] = False,
    topic: TopicsOption = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Compare the store with the log.

    Exit with code 1 if differences remain that were not repaired.
    """
    output.choose(json=json, check=True)
    with open_job_book(book) as (each, portal), session(each, "verify") as spark:
        from tidebook.pipeline.jobs.verify import verify as job

        named = tuple(dict.fromkeys([*(topics or ()), *(topic or ())]))
        done = job(spark, each, portal, named, repair=repair, tell=_show)
    _finish(done)


def rebuild(
    topic: TopicArgument,
    tags: Annotated[
        bool, typer.Option("--tags", help="Rebuild only the tag views, from the journals in the store.")
    ] = False,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Rebuild a topic's store from its whole log.

    Fail if the log no longer contains the first record.
    """
    output.choose(json=json, check=True)
    with open_job_book(book) as (each, portal), session(each, "rebuild") as spark:
        from tidebook.pipeline.jobs.rebuild import rebuild as job
        from tidebook.pipeline.jobs.rebuild import rebuild_tags

        if tags:
            tagged = rebuild_tags(spark, each, portal, topic)
            output.emit(
                {"topic": topic, "tag_rows": tagged.written, "removed": tagged.removed},
                f"{topic}: {tagged.written:,} tag rows written, {tagged.removed:,} removed",
            )
            return
        done = job(spark, each, portal, topic, tell=_show)
    _finish(done)


def _show(found: Difference) -> None:
    at = f"{found.topic}/{found.id}" + ("" if found.seq_nr is None else f" {found.seq_nr}")
    details = [f"expected {found.expected}" if found.expected else "", f"found {found.found}" if found.found else ""]
    output.emit(msgspec.to_builtins(found), f"{at}: {found.what}; {', '.join(filter(None, details))}")


def _finish(done: VerifyResult) -> None:
    differing = sum(done.differences.values())
    text = f"{done.journals:,} journals with {done.events:,} events compared, {differing:,} differences"
    if differing:
        text += f", {done.repaired:,} repaired, {done.left:,} left"
    if done.partial:
        topics = ", ".join(done.partial)
        text += f"; the log of {topics} no longer contains its first records: earlier events were not compared"
    output.emit(msgspec.to_builtins(done), text)
    if done.left:
        raise typer.Exit(1)
