"""What every command shares: which book, how to speak, how to run."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Annotated, Any

import typer

from tidebook.cli import output
from tidebook.core.errors import TidebookError

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
    try:
        asyncio.run(body())
    except BrokenPipeError as error:  # whoever read the output has left, as `head` does: that is no failure
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from error
    except BaseExceptionGroup as group:
        raise _cause(group) from group


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Why a group of tasks failed: a mistake of ours before all, then the first error."""
    leaves = list(_leaves(group))
    return next((each for each in leaves if not isinstance(each, TidebookError)), leaves[0])


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for each in group.exceptions:
        if isinstance(each, BaseExceptionGroup):
            yield from _leaves(each)
        else:
            yield each
