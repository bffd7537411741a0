"""`tidebook`: the command line. Each group is a module beside this one: parse, call, print."""

from __future__ import annotations

import sys
from typing import Any

import typer

from tidebook.cli import bench, doctor, flush_wal, journal, outbox, output, pipeline, queue, tags, up, wal
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
app.command(context_settings=bench.ANY_ARGUMENTS)(bench.bench)
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


#: Bad usage, as typer raises it; whether that is click's own class or a copy of it depends on typer's version.
BadUsage: type[Exception] = next(each for each in typer.BadParameter.__mro__ if each.__name__ == "ClickException")


def main() -> None:
    """The console script."""
    try:
        code = app(prog_name="tidebook", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except TidebookError as error:
        _say(str(error))
        sys.exit(exit_code(error))
    except BadUsage as error:
        _tell_usage(error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _say(text: str) -> None:
    output.aside.print(f"tidebook: {' '.join(text.split())}", markup=False, soft_wrap=True)


def _tell_usage(error: Any) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":  # nothing was asked for: its message is the help
        error.show()
        return
    command = error.ctx.command_path if error.ctx else "tidebook"
    _say(f"{error.format_message().rstrip('.')}: see {command} --help")


if __name__ == "__main__":
    main()
