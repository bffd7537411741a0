"""`tidebook topics`: list, describe and delete topics."""

from __future__ import annotations

from collections.abc import Sequence

from tidebook.cli import output
from tidebook.cli.command import Group
from tidebook.cli.options import TopicArgument, flag
from tidebook.core.errors import NotFound
from tidebook.wiring.book import Book
from tidebook.wiring.topics import TopicDescription

app = Group(help="List, describe and delete topics.", no_args_is_help=True)


async def require_topics(book: Book, topics: Sequence[str] | None) -> None:
    """Raise `NotFound` if the book lacks a topic of `--topic`: otherwise the command would silently do nothing."""
    known = set(await book.topics()) if topics else set()
    for topic in topics or ():
        if topic not in known:
            raise NotFound(f"topic {topic}: there is no such topic in this book")


async def checked_description(book: Book, topic: str) -> TopicDescription:
    """Describe a topic of journals; raise an error if its log and its store do not match."""
    await book.journal(topic).topic_config()
    return await book.describe_topic(topic)


@app.command("list")
async def list_topics(
    book: Book,
    all_: bool = flag("--all", "List every topic of the log, including write-ahead logs and messages."),
) -> None:
    """List the topics that hold journals."""
    names = sorted({*await book.topics(), *(await book.log.topics() if all_ else ())})
    for name in names:
        output.emit({"topic": name}, name)
    if not names:
        output.note_empty("no topics")


@app.command()
async def describe(book: Book, topic: TopicArgument) -> None:
    """Print a topic's kind, partitions, epoch, offsets and lag."""
    found = await book.describe_topic(topic)
    epoch = "" if found.epoch is None else f", epoch {found.epoch}"
    lag = "" if found.lag is None else f", {found.lag:,} records not replicated yet"
    lines = [f"{found.topic}: {found.kind}, {found.partitions} partitions{epoch}{lag}"]
    for number, (start, end, pointer) in enumerate(zip(found.starts, found.ends, found.pointers, strict=True)):
        replicated = "" if pointer is None else f", replicated to {pointer:,}"
        lines.append(f"  partition {number}: offsets {start:,} to {end:,}{replicated}")
    output.emit(found.as_row(), "\n".join(lines))


@app.command(question="Delete topic {topic} and all its data permanently?", ask_scripts=True)
async def delete(book: Book, topic: TopicArgument) -> None:
    """Delete a topic and all its data permanently.

    Stop its writers and its replication first.
    """
    await book.delete_topic(topic)
    output.emit({"topic": topic, "deleted": True}, f"topic {topic}: deleted")
