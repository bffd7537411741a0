"""The `tidebook` command: its groups of commands, exit codes and error reporting.

Each group of commands is a module of this package: it parses arguments, calls the library and prints the result.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import typer

import tidebook
from tidebook.cli import (
    audit,
    backup,
    doctor,
    importing,
    journal,
    outbox,
    output,
    pipeline,
    projection,
    queue,
    running,
    serve,
    tags,
    token,
    topics,
    up,
    wal,
)
from tidebook.cli.command import INTERRUPTED, Group
from tidebook.cli.options import argument
from tidebook.core.errors import Conflict, Fenced, InvalidInput, LeaseLost, NotFound, TidebookError, Unavailable
from tidebook.runtime.json_log import is_json, redact_urls

#: If this environment variable is set, an unexpected error prints its traceback.
TRACEBACK_VARIABLE = "TIDEBOOK_TRACEBACK"
#: A shell sets this variable to get completions, after `tidebook --install-completion`.
COMPLETION_VARIABLE = "_TIDEBOOK_COMPLETE"
SHELLS = ("bash", "zsh", "fish")
#: A longer error is shortened in its middle: its beginning says what failed, its end what to do.
REPORT_CHARS_MAX = 2_000
#: The root of the checkout that this package was imported from; an installed wheel has no benchmarks there.
CHECKOUT = Path(__file__).resolve().parents[3]

app = Group(
    name="tidebook",
    help="Keep durable event journals, tags, write-ahead logs, outboxes and work queues.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)

app.command()(up.up)
app.command()(serve.serve)
app.command("run")(running.run_app)
for noun in (journal, tags, topics, wal, pipeline, outbox, queue, projection, token, audit):
    app.add_typer(noun.app, name=noun.__name__.rpartition(".")[2])
app.add_typer(importing.app, name="import")
app.command("backup")(backup.make_backup)
app.command("restore")(backup.restore_backup)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    hidden=not (CHECKOUT / "bench" / "__main__.py").exists(),
)
def bench(context: typer.Context, name: str = argument("NAME", "The benchmark, for example: journal")) -> None:
    """Run one benchmark and compare it with its reference.

    Further arguments go to the benchmark. The last line that it prints is a JSON object with its ratios by name.
    """
    if not (CHECKOUT / "bench" / "__main__.py").exists():
        raise NotFound("benchmarks are not in the installed package: run ./dev bench NAME in a source checkout")
    sys.path.insert(0, str(CHECKOUT))
    from bench.__main__ import main

    try:
        code = main([name, *context.args])
    except ModuleNotFoundError as error:
        raise InvalidInput(f"bench {name} needs {error.name}, which is not installed: run ./dev setup") from error
    raise typer.Exit(code)


app.command(check=True)(doctor.doctor)


@app.command()
def completion(shell: str = argument("SHELL", "bash, zsh or fish")) -> None:
    """Print the completion script of a shell.

    For example, in ~/.bashrc: eval "$(tidebook completion bash)"
    """
    if shell not in SHELLS:
        raise InvalidInput(f"there is completion for {', '.join(SHELLS)}, not for {shell!r}")
    os.environ[COMPLETION_VARIABLE] = f"source_{shell}"
    _command().main([], prog_name="tidebook")


def _print_version(wanted: bool) -> None:
    if wanted:
        output.write(f"tidebook {tidebook.__version__}\n")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
    ),
) -> None:
    """Keep durable event journals, tags, write-ahead logs, outboxes and work queues."""


def exit_code(error: TidebookError) -> int:
    """Return the exit code of an error; the codes are part of the documented interface."""
    match error:
        case InvalidInput():
            return 2
        case Conflict() | Fenced() | LeaseLost():
            return 3
        case NotFound():
            return 4
        case _:  # for example unavailable, damaged, lost, or of unknown outcome
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
        command = _command()
        if COMPLETION_VARIABLE in os.environ:  # the shell asks for completions
            command.main(list(arguments), prog_name="tidebook")
        # Not command.main(), as for completions: its error handling would turn a closed pipe into a failure.
        try:
            context = command.make_context("tidebook", list(arguments))
        except SystemExit:  # --show-completion has printed its result
            return 0
        except typer.Exit as exit_:  # --version has printed its result, or (code 1) the shell has no completion
            return 2 if exit_.exit_code else 0
        except OSError as error:
            raise Unavailable(f"completion cannot be installed: {error}") from error
        with context:
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
    """Print an error as one line on standard error, without passwords; shorten one that quotes a huge argument."""
    if is_json():
        logging.getLogger("tidebook.cli").error("%s", text)
        return
    line = redact_urls(" ".join(text.split()))
    if len(line) > REPORT_CHARS_MAX:
        line = f"{line[: REPORT_CHARS_MAX // 2]} … {line[-REPORT_CHARS_MAX // 2 :]}"
    with suppress(OSError):  # the exit code still reports the failure
        sys.stderr.write(f"tidebook: {line}\n")
        sys.stderr.flush()


def _report_usage(error: Any) -> None:
    if type(error).__name__ == "NoArgsIsHelpError":  # no command was given: print the help
        with suppress(OSError):
            error.show()
        return
    command = error.ctx.command_path if error.ctx else "tidebook"
    is_number = re.match(r"-\d", getattr(error, "option_name", None) or "")
    hint = " (a negative number goes after --, as in: -- -5)" if is_number else ""
    message = error.format_message().rstrip(".")
    separator = "" if message.endswith("?") else ":"  # click asks "Did you mean …?"
    _report(f"{message}{hint}{separator} see {command} --help")


if __name__ == "__main__":
    main()
