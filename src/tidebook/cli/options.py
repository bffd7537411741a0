"""Options and argument checks that commands share, and functions to open a book and run a command's coroutine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from tidebook.cli import output
from tidebook.core.errors import InvalidInput, NotFound, TidebookError
from tidebook.core.key import journal_id, topic_name
from tidebook.core.seq_nr import FIRST, LAST
from tidebook.wiring.book import Book
from tidebook.wiring.settings import Settings, read_settings

#: A hundred years.
SECONDS_MAX = 100 * 365 * 86_400
PORT_MAX = 65_535
DEFAULT_BOOK = "./tidebook-data"
#: The files of a book's folder, each with the settings section that may replace it by a server.
BOOK_FILES = {"log.db": "log", "store.db": "store", "queue.db": "sql", "outbox.db": "sql"}

BookOption = Annotated[
    str | None,
    typer.Option(
        "--book", envvar="TIDEBOOK", help="A folder or a tidebook.toml.", show_default=DEFAULT_BOOK, metavar="PATH"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object per line, also on a terminal.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
LimitOption = Annotated[int, typer.Option("--limit", metavar="N", min=1, max=10_000, help="Print at most N.")]
OnceOption = Annotated[bool, typer.Option("--once", help="Process what is pending now, then exit.")]


def _address(value: str | None) -> str | None:
    port = "" if value is None else value.rpartition(":")[2]
    if value is not None and not (port.isascii() and port.isdecimal() and int(port) <= PORT_MAX):
        raise InvalidInput(f"--metrics is HOST:PORT, for example 127.0.0.1:9401, not {value!r}")
    return value


MetricsOption = Annotated[
    str | None,
    typer.Option(
        "--metrics", metavar="HOST:PORT", help="Serve /metrics for Prometheus at this address.", callback=_address
    ),
]


def _topics(values: list[str] | None) -> list[str] | None:
    return None if values is None else [topic_name(each) for each in values]


def _tag(value: str) -> str:
    if not value:
        raise InvalidInput("a tag must be a non-empty text")
    return value


TopicArgument = Annotated[
    str, typer.Argument(metavar="TOPIC", help="The topic, for example: orders", callback=topic_name)
]
IdArgument = Annotated[
    str, typer.Argument(metavar="ID", help="The journal's id, for example: o-1", callback=journal_id)
]
TagArgument = Annotated[str, typer.Argument(metavar="TAG", help="The tag, for example: paid", callback=_tag)]
TopicsOption = Annotated[
    list[str] | None,
    typer.Option("--topic", metavar="TOPIC", help="Use only this topic; may be repeated.", callback=_topics),
]
StartOption = Annotated[
    int, typer.Option("--start", metavar="N", min=FIRST, max=LAST, help="Start at this sequence number.")
]


def seconds(option: str, *, least: float = 0.0) -> Callable[[float | None], float | None]:
    """Return a callback that checks an option in seconds: from `least` to a hundred years."""

    def check(value: float | None) -> float | None:
        if value is not None and not least <= value <= SECONDS_MAX:  # also rejects NaN
            raise InvalidInput(f"{option} is a time in seconds, from {least:g} to a hundred years, not {value:g}")
        return value

    return check


def book_path(book: str | None) -> str:
    """Return the path of the chosen book, or the default path."""
    return book if book is not None else DEFAULT_BOOK


def book_settings(book: str | None) -> Settings:
    """Return the settings of the chosen book; raise `NotFound` if it is a settings file that does not exist."""
    where = book_path(book)
    if where.endswith(".toml") and "://" not in where and not Path(where).exists():
        raise NotFound(f"{where}: there is no such settings file")
    return read_settings(where)


def existing_settings(book: str | None) -> Settings:
    """Return the settings of an existing book; raise `NotFound` if there is none, and create nothing.

    A book with a part on a server is assumed to exist; the server is not queried.
    """
    settings = book_settings(book)
    if not all(settings.section(name).embedded for name in BOOK_FILES.values()) or has_files(settings):
        return settings
    raise NotFound(f"there is no book at {settings.folder}: the first append, put or publish creates one")


def has_files(settings: Settings) -> bool:
    """Return True if a book's folder has one of its files, or is itself a file, which is reported when it is opened."""
    folder = settings.folder.expanduser()
    return any(folder.glob("*.db-wal")) or any((folder / file).exists() for file in BOOK_FILES) or folder.is_file()


@asynccontextmanager
async def open_book(book: str | None, *, create: bool = False) -> AsyncIterator[Book]:
    """Open the chosen book. Without `create` it must exist; with it, the first write creates what is missing."""
    settings = book_settings(book) if create else existing_settings(book)
    async with Book(settings) as each:
        yield each


async def require_topic(book: Book, topic: str) -> None:
    """Raise `NotFound` if the topic does not exist; do not create it."""
    if topic not in await book.topics():
        raise NotFound(f"topic {topic}: there is no such topic in this book; the first append creates it")


def confirm(question: str, *, yes: bool) -> None:
    """Ask for confirmation on the terminal, unless `yes`; raise `InvalidInput` unless the answer is yes.

    Call it outside an event loop: inside one, Ctrl-C would have no effect until the user answers.
    """
    if yes:
        return
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    answer = sys.stdin.readline()
    if not answer:
        sys.stderr.write("\n")
        raise InvalidInput("there was no answer, and nothing was changed: use --yes to skip the question")
    if answer.strip().lower() not in {"y", "yes"}:
        raise InvalidInput("not confirmed, and nothing was changed")


def run(body: Callable[[], Coroutine[Any, Any, None]], *, json: bool, check: bool = False) -> None:
    """Run a command's coroutine; `main` turns its errors into one line and an exit code."""
    output.choose(json=json, check=check)
    try:
        asyncio.run(body())
    except BaseExceptionGroup as group:
        raise _cause(group) from group


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the cause of a group's failure: an unexpected error first, otherwise the first error."""
    leaves = list(_leaves(group))
    return next((each for each in leaves if not isinstance(each, TidebookError)), leaves[0])


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for each in group.exceptions:
        if isinstance(each, BaseExceptionGroup):
            yield from _leaves(each)
        else:
            yield each
