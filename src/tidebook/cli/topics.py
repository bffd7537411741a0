"""`tidebook topics`: list, describe and delete topics."""

from __future__ import annotations

from typing import Annotated

import typer

from tidebook.cli import output
from tidebook.cli.help import Group
from tidebook.cli.options import BookOption, JsonOption, TopicArgument, YesOption, confirm, open_book, run
from tidebook.wiring.topics import TopicDescription

app = Group(help="List, describe and delete topics.", no_args_is_help=True)


@app.command("list")
def list_topics(
    all_: Annotated[
        bool, typer.Option("--all", help="List every topic of the log, including write-ahead logs and messages.")
    ] = False,
    book: BookOption = None,
    json: JsonOption = False,
) -> None:
    """List the topics that hold journals."""

    async def go() -> None:
        async with open_book(book) as each:
            names = set(await each.topics())
            if all_:
                names |= set(await each.log.topics())
            for name in sorted(names):
                output.emit({"topic": name}, name)

    run(go, json=json)


@app.command()
def describe(topic: TopicArgument, book: BookOption = None, json: JsonOption = False) -> None:
    """Print a topic's kind, partitions, epoch, offsets and lag."""

    async def go() -> None:
        async with open_book(book) as each:
            found = await each.describe_topic(topic)
        output.emit(found.as_row(), _sentences(found))

    run(go, json=json)


@app.command()
def delete(topic: TopicArgument, yes: YesOption = False, book: BookOption = None, json: JsonOption = False) -> None:
    """Delete a topic and all its data permanently.

    Stop its writers and its replication first.
    """
    confirm(f"Delete topic {topic} and all its data permanently?", yes=yes)

    async def go() -> None:
        async with open_book(book) as each:
            await each.delete_topic(topic)
        output.emit({"topic": topic, "deleted": True}, f"topic {topic}: deleted")

    run(go, json=json)


def _sentences(found: TopicDescription) -> str:
    epoch = "" if found.epoch is None else f", epoch {found.epoch}"
    lag = "" if found.lag is None else f", {found.lag:,} records not replicated yet"
    lines = [f"{found.topic}: {found.kind}, {found.partitions} partitions{epoch}{lag}"]
    for number, (start, end, pointer) in enumerate(zip(found.starts, found.ends, found.pointers, strict=True)):
        replicated = "" if pointer is None else f", replicated to {pointer:,}"
        lines.append(f"  partition {number}: offsets {start:,} to {end:,}{replicated}")
    return "\n".join(lines)
