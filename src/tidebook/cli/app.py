"""The `tidebook` command: its groups of commands, exit codes and error reporting.

Each group of commands is a module of this package: it parses arguments, calls the library and prints the result.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Annotated, Any

import typer

import tidebook
from tidebook.cli import bench, doctor, flush_wal, journal, outbox, output, pipeline, queue, tags, topics, up, wal
from tidebook.cli.help import Group
from tidebook.cli.signals import INTERRUPTED
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

#: If this environment variable is set, an unexpected error prints its traceback.
TRACEBACK_VARIABLE = "TIDEBOOK_TRACEBACK"

app = Group(
    name="tidebook",
    help="Keep durable journals: event journals, tags, write-ahead logs, outboxes and work queues.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)

app.command()(up.up)
app.add_typer(journal.app, name="journal")
app.add_typer(tags.app, name="tags")
app.add_typer(topics.app, name="topics")
app.add_typer(wal.app, name="wal")
app.add_typer(pipeline.app, name="pipeline")
pipeline.app.command("flush-wal")(flush_wal.flush_wal)
app.add_typer(outbox.app, name="outbox")
app.add_typer(queue.app, name="queue")
app.command(context_settings=bench.ANY_ARGUMENTS)(bench.bench)
app.command()(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        output.write(f"tidebook {tidebook.__version__}\n")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Keep durable journals: event journals, tags, write-ahead logs, outboxes and work queues."""


def exit_code(error: TidebookError) -> int:
    """Return the exit code of an error; the codes are part of the documented interface."""
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


#: The error that typer raises for bad usage. Depending on its version, typer uses click's class or a copy of it.
BadUsage: type[Exception] = next(each for each in typer.BadParameter.__mro__ if each.__name__ == "ClickException")


def main() -> None:
    """Run the command that the process's arguments name, and exit with its code."""
    if sys.stdout is None:  # the parent process closed it
        _report("standard output is closed: redirect it to a file or to /dev/null")
        sys.exit(2)
    code = 0
    try:
        with output.guarded():
            code = run(sys.argv[1:])
    except output.OutputFailed as failed:
        code = _output_failed(failed.error, code)
    sys.exit(code)


@cache
def _command() -> Any:
    return typer.main.get_command(app)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; report an error as one line on standard error, not as a traceback."""
    try:
        # Do not call app(): its error handling would turn a closed pipe into a failure.
        command = _command()
        with command.make_context("tidebook", list(arguments)) as context:
            command.invoke(context)
        return 0
    except typer.Exit as exit_:
        return exit_.exit_code
    except output.OutputFailed:
        raise
    except TidebookError as error:
        _report(str(error))
        return exit_code(error)
    except BadUsage as error:
        _report_usage(error)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        _report(f"unexpected {type(error).__name__}: {error}: set {TRACEBACK_VARIABLE}=1 for a traceback")
        return 5


def _output_failed(error: OSError, code: int) -> int:
    """Return the exit code after a failed write to standard output; a closed pipe, as with `head`, is not an error."""
    output.discard()
    if isinstance(error, BrokenPipeError):
        return code
    _report(f"standard output cannot be written: {error.strerror}: changes that the command made are kept")
    return 5


def _report(text: str) -> None:
    try:
        sys.stderr.write(f"tidebook: {' '.join(text.split())}\n")
        sys.stderr.flush()
    except OSError:
        pass  # the exit code still reports the failure


def _report_usage(error: Any) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":  # no command was given: print the help
        error.show()
        return
    command = error.ctx.command_path if error.ctx else "tidebook"
    _report(f"{error.format_message().rstrip('.')}: see {command} --help")


if __name__ == "__main__":
    main()
