"""What every command shares: which book, how to speak, how to run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import typer

from tidebook.cli import output

DEFAULT_BOOK = "./tidebook-data"

BookOption = Annotated[
    str | None,
    typer.Option(
        "--book", envvar="TIDEBOOK", help="A folder or a tidebook.toml.", show_default=DEFAULT_BOOK, metavar="PATH"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object a line, also on a terminal.")]


def chosen(book: str | None) -> str:
    """The book that was named, or the default."""
    return book if book is not None else DEFAULT_BOOK


def run(body: Callable[[], Coroutine[Any, Any, None]], *, json: bool) -> None:
    """Run a command's body; errors go up to `main`, which turns them into one line and an exit code."""
    output.choose(json=json)
    asyncio.run(body())
