"""`tidebook`: the command line. Each group is a module beside this one: parse, call, print."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import typer

from tidebook.cli import output
from tidebook.core.errors import (
    Conflict,
    Corrupt,
    Fenced,
    InvalidInput,
    LeaseLost,
    LogLost,
    NotFound,
    OutcomeUnknown,
    TidebookError,
    Unavailable,
)

T = TypeVar("T")

app = typer.Typer(
    name="tidebook",
    help="Durable journals: event journals, tags, write-ahead logs, outboxes and work queues.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Book = typer.Option("--book", envvar="TIDEBOOK", help="A folder or a tidebook.toml.", show_default=True)
Json = typer.Option("--json", help="One JSON object a line, also on a terminal.")
DEFAULT_BOOK = "./tidebook-data"


def exit_code(error: TidebookError) -> int:
    """The stable exit code of an error."""
    match error:
        case InvalidInput():
            return 2
        case Conflict() | Fenced() | LeaseLost():
            return 3
        case NotFound():
            return 4
        case Unavailable() | OutcomeUnknown() | Corrupt() | LogLost():
            return 5
        case _:
            return 5


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a command's body; an error becomes one line and its exit code."""
    return asyncio.run(coroutine)


def main() -> None:
    """The console script."""
    try:
        app()
    except TidebookError as error:
        output.aside.print(f"tidebook: {error}", markup=False, soft_wrap=True)
        sys.exit(exit_code(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
