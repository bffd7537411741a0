"""Options and arguments that commands share, and functions to find and open the chosen book."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypeGuard

import typer

from tidebook.core.errors import InvalidInput, NotFound
from tidebook.core.key import journal_id, topic_name
from tidebook.core.payload import decode_json
from tidebook.core.seq_nr import LAST
from tidebook.sqlite.errors import from_os
from tidebook.wiring.book import Book, open_remote
from tidebook.wiring.replication import is_embedded
from tidebook.wiring.settings import DEFAULT_BOOK, PROCESS_FILE, Settings, read_settings

#: A hundred years.
SECONDS_MAX = 100 * 365 * 86_400
PORT_MAX = 65_535
#: The files of a book's folder, each with the settings section that may name a server instead.
BOOK_FILES = {"log.db": "log", "store.db": "store", "queue.db": "sql", "outbox.db": "sql", PROCESS_FILE: "store"}
#: The file with the tokens of the server; a book has it even if all of its parts are on servers.
SERVER_FILE = "server.db"


def option(metavar: str, help: str, default: Any = None, **how: Any) -> Any:
    """Return an option with a value, as the default of a parameter; it is required if its default is `...`."""
    return typer.Option(default, metavar=metavar, help=help, **how)


def number(help: str, least: int = 1, most: int | None = LAST, default: Any = None, **how: Any) -> Any:
    """Return an option that takes a whole number."""
    return option(how.pop("metavar", "N"), help, default, min=least, max=most, **how)


def seconds(help: str, default: Any = None, *, least: float = 0.0) -> Any:
    """Return an option that takes a time in seconds, from `least` to a hundred years."""

    def check(parameter: typer.CallbackParam, value: float | None) -> float | None:
        if value is not None and not least <= value <= SECONDS_MAX:  # also rejects NaN
            name = parameter.opts[0]
            raise InvalidInput(f"{name} must be a number of seconds from {least:g} to a hundred years, not {value:g}")
        return value

    return option("SECONDS", help, default, callback=check)


def flag(name: str, help: str) -> Any:
    """Return an option without a value."""
    return typer.Option(False, name, help=help)


def argument(metavar: str, help: str, default: Any = ..., **how: Any) -> Any:
    """Return an argument, which is required if its default is `...`."""
    return typer.Argument(default, metavar=metavar, help=help, **how)


def _address(value: str | None) -> str | None:
    port = "" if value is None else value.rpartition(":")[2]
    if value is not None and not (port.isascii() and port.isdecimal() and int(port) <= PORT_MAX):
        raise InvalidInput(f"--metrics must be HOST:PORT, for example 127.0.0.1:9401, not {value!r}")
    return value


def _topics(values: list[str] | None) -> list[str] | None:
    return None if values is None else [topic_name(each) for each in values]


def _tag(value: str) -> str:
    if not value:
        raise InvalidInput("a tag must not be empty")
    return value


BookOption = Annotated[
    str | None,
    typer.Option(
        "--book",
        envvar="TIDEBOOK",
        help="A folder, a tidebook.toml, or the address of a server.",
        show_default=DEFAULT_BOOK,
        metavar="PATH",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object per line, even on a terminal.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
LimitOption = Annotated[int, number("Print at most N.", 1, 10_000, ...)]
OnceOption = Annotated[bool, typer.Option("--once", help="Process what is pending now, then exit.")]
StartOption = Annotated[int, number("Start at this sequence number.", default=...)]
MetricsOption = Annotated[
    str | None, option("HOST:PORT", "Serve /metrics for Prometheus at this address.", ..., callback=_address)
]
LogJsonOption = Annotated[
    bool, typer.Option("--log-json", help="Write logs as JSON lines on standard error, without secrets and payloads.")
]
TopicsOption = Annotated[
    list[str] | None, option("TOPIC", "Use only this topic; may be repeated.", ..., callback=_topics)
]
TopicArgument = Annotated[str, argument("TOPIC", "The topic, for example: orders", callback=topic_name)]
IdArgument = Annotated[str, argument("ID", "The journal's id, for example: o-1", callback=journal_id)]
TagArgument = Annotated[str, argument("TAG", "The tag, for example: paid", callback=_tag)]


def parse_payload(text: str) -> Any:
    """Parse a JSON value from the command line; raise `InvalidInput` if it is not valid."""
    try:
        return decode_json(text.encode())
    except ValueError as error:
        raise InvalidInput(
            f"{text[:60]!r} is not a JSON value ({error}): quote text twice, as in '\"text\"'"
        ) from error


def parse_time(option: str, text: str) -> datetime:
    """Parse an option's time in ISO 8601; raise `InvalidInput` if it has no time zone."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidInput(f"{option}: {text!r} is not a time such as 2030-01-31T12:00:00Z") from error
    if found.tzinfo is None:
        raise InvalidInput(f"{option}: {text!r} has no time zone: write {text}Z for UTC, or an offset such as +02:00")
    return found


def book_settings(book: str | None, *, create: bool = False) -> Settings:
    """Return the settings of the chosen book; raise `NotFound` if it does not exist, unless `create`.

    A missing settings file is never created. A book with a part on a server is assumed to exist; the server is not
    queried.
    """
    where = DEFAULT_BOOK if book is None else book
    if where.endswith(".toml") and "://" not in where and not Path(where).exists():
        raise NotFound(f"{where}: there is no such settings file")
    settings = read_settings(where)
    exists = _has_files(settings) or not all(settings.section(name).embedded for name in BOOK_FILES.values())
    if create or exists:
        return settings
    raise NotFound(f"there is no book at {settings.folder}: the first append, put or publish creates one")


def _has_files(settings: Settings) -> bool:
    """Return True if a book's folder has one of its files, or is itself a file, which is reported when it is opened.

    Raise `InvalidInput` if this user may not search the folder.
    """
    folder = settings.folder.expanduser()
    files = (*BOOK_FILES, SERVER_FILE)
    try:
        return any((folder / file).exists() for file in files) or any(folder.glob("*.db-wal")) or folder.is_file()
    except OSError as error:
        raise from_os(error, folder) from error


def embedded_files(settings: Settings) -> list[str]:
    """Return the names of the files that a book has in its folder, whether they exist or not."""
    return [*(file for file, section in BOOK_FILES.items() if settings.section(section).embedded), SERVER_FILE]


def is_address(where: str | None) -> TypeGuard[str]:
    """Return whether the name of a book is the address of a server."""
    return where is not None and where.lower().startswith(("http://", "https://"))


def open_address(where: str) -> Book:
    """Return the book of a server, to be opened with `async with`; its token comes from the environment."""
    token, tls_ca = os.environ.get("TIDEBOOK_TOKEN"), os.environ.get("TIDEBOOK_TLS_CA")
    return open_remote(where, token=token or None, tls_ca=tls_ca or None)


@asynccontextmanager
async def open_book(book: str | None, *, create: bool = False, replicate: bool = False) -> AsyncIterator[Book]:
    """Open the chosen book. Without `create` it must exist; with it, the first write creates what is missing.

    With `replicate` this process replicates the book if it is embedded.
    """
    where = DEFAULT_BOOK if book is None else book
    if is_address(where):
        chosen = open_address(where)
    else:
        settings = book_settings(book, create=create)
        chosen = Book(settings, replicate=replicate and is_embedded(settings))
    async with chosen as opened:
        yield opened


def confirm(question: str, *, yes: bool, scripts: bool = True) -> None:
    """Ask for confirmation, unless `yes`; raise `InvalidInput` unless the answer is yes.

    If standard input is not a terminal, as in a script, ask only if `scripts`: the script then needs `--yes`.
    Call it outside an event loop: inside one, Ctrl-C would have no effect until the user answers.
    """
    if yes or not (scripts or sys.stdin.isatty()):
        return
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    answer = sys.stdin.readline()
    if not answer:
        sys.stderr.write("\n")
        raise InvalidInput("there was no answer, and nothing was changed: use --yes to skip the question")
    if answer.strip().lower() not in {"y", "yes"}:
        raise InvalidInput("not confirmed, and nothing was changed")


def load_callable(text: str) -> Callable[..., Any]:
    """Import a callable given as `module:name`; search the working directory too."""
    module, separator, name = text.partition(":")
    if not separator or not module or not name:
        raise InvalidInput(f"{text!r} is not a function of a module: write it as module:name")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # importing runs the module, which may raise anything
        raise InvalidInput(f"{text} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise InvalidInput(f"{text} is not callable")
    loaded: Callable[..., Any] = found
    return loaded


@asynccontextmanager
async def application_parts(make: Callable[..., Any], book: Book) -> AsyncIterator[list[object]]:
    """Call an application's function and yield its parts; if it returns a context manager, stay inside it."""
    made = make(book)
    async with AsyncExitStack() as stack:
        if hasattr(made, "__aenter__"):
            parts = await stack.enter_async_context(made)
        else:
            parts = await made if inspect.isawaitable(made) else made
        yield list(parts) if isinstance(parts, Iterable) else [parts]
