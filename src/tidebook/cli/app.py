"""`tidebook`: the command line. Each group is a module beside this one: parse, call, print."""

from __future__ import annotations

import sys

import typer

from tidebook.cli import doctor, flush_wal, journal, outbox, output, pipeline, queue, tags, up, wal
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

app = typer.Typer(
    name="tidebook",
    help="Durable journals: event journals, tags, write-ahead logs, outboxes and work queues.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command()(up.up)
app.add_typer(journal.app, name="journal")
app.add_typer(tags.app, name="tags")
app.add_typer(wal.app, name="wal")
app.add_typer(pipeline.app, name="pipeline")
pipeline.app.command("flush-wal")(flush_wal.flush_wal)
app.add_typer(outbox.app, name="outbox")
app.add_typer(queue.app, name="queue")
app.command()(doctor.doctor)


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


if __name__ == "__main__":
    main()
