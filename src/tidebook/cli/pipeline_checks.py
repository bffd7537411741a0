"""`tidebook pipeline verify` and `rebuild`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tidebook.cli import output
from tidebook.cli.options import BookOption, JsonOption
from tidebook.cli.pipeline_session import TopicsOption, opened, session

if TYPE_CHECKING:
    from tidebook.pipeline.jobs.verify import Verified
    from tidebook.pipeline.transforms.shelf import Difference


def verify(
    topics: Annotated[
        list[str] | None, typer.Argument(help="These topics alone; all without.", metavar="TOPIC")
    ] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Mend the store from the log.")] = False,
    topic: TopicsOption = None,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Fold the log and compare the store with it; exit code 1 where something differs and was not mended."""
    output.choose(json=json)
    with opened(book) as (each, portal), session(each, "verify") as spark:
        from tidebook.pipeline.jobs.verify import verify as job

        named = tuple(dict.fromkeys([*(topics or ()), *(topic or ())]))
        done = job(spark, each, portal, named, repair=repair, tell=_show)
    _finish(done)


def rebuild(
    topic: Annotated[str, typer.Argument(help="The topic whose store is made anew.")],
    tags: Annotated[bool, typer.Option("--tags", help="Only the tag views, from the journals in the store.")] = False,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """Make the store of a topic what its whole log says; refused where the log no longer reaches back."""
    output.choose(json=json)
    with opened(book) as (each, portal), session(each, "rebuild") as spark:
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
    facts = [f"expected {found.expected}" if found.expected else "", f"found {found.found}" if found.found else ""]
    output.emit(msgspec.to_builtins(found), f"{at}: {found.what}; {', '.join(filter(None, facts))}")


def _finish(done: Verified) -> None:
    differing = sum(done.differences.values())
    text = f"{done.journals:,} journals with {done.events:,} events compared, {differing:,} differences"
    if differing:
        text += f", {done.mended:,} mended, {done.left:,} left"
    if done.partial:
        text += f"; the log of {', '.join(done.partial)} no longer reaches back: what lies before was not compared"
    output.emit(msgspec.to_builtins(done), text)
    if done.left:
        raise typer.Exit(1)
