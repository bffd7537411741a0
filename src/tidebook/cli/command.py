"""Commands: each has a plain help text, opens its book, runs its coroutine, and stops on signals."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import FrameType
from typing import Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from tidebook.cli import output
from tidebook.cli.options import BookOption, JsonOption, YesOption, confirm, open_book
from tidebook.core.errors import TidebookError
from tidebook.wiring.book import Book

#: The exit code of a command that was interrupted.
INTERRUPTED = 128 + signal.SIGINT
Function = TypeVar("Function", bound=Callable[..., Any])
_BOUNDS = re.compile(r"<=\d{10,}")


class HelpfulCommand(TyperCommand):
    """A command whose help shows `TOPIC` instead of typer's `{TOPIC}` and `TOPIC <str>`."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line, with only optional parts in brackets."""
        pieces = [re.sub(r"^\{(.*)\}", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]
        return [piece.removesuffix("...") if " " in piece else piece for piece in pieces]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options without types and without huge upper bounds."""
        rows: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for each in self.get_params(ctx):
            record = each.get_help_record(ctx)
            if record is None:
                continue
            name, text = record
            if each.param_type_name == "argument":
                name, text = getattr(each, "metavar", None) or name, text.replace("[required]", "").rstrip()
            rows[each.param_type_name].append((name, _BOUNDS.sub("", text)))
        for title, found in (("Arguments", rows["argument"]), ("Options", rows["option"])):
            if found:
                with formatter.section(title):
                    formatter.write_dl(found)


class Group(typer.Typer):
    """A group of commands.

    A command with a parameter `book` gets the options `--book` and `--json`. If the parameter is a `Book`, the book is
    opened, and must exist; otherwise the parameter is the value of `--book`. A command may be a coroutine function.
    """

    def command(
        self,
        name: str | None = None,
        *,
        check: bool = False,
        question: str | None = None,
        ask_scripts: bool = False,
        **options: Any,
    ) -> Callable[[Function], Function]:
        """Register a command, as `typer.Typer.command` does; the exit code of a `check` is its result.

        A command with a `question`, which may name parameters in braces, runs only if the answer is yes, or with
        `--yes`; see `confirm`.
        """

        def register(function: Function) -> Function:
            add = super(Group, self).command(name, **{"cls": HelpfulCommand, **options})
            if "book" in inspect.signature(function).parameters:
                add(_with_book(function, check=check, question=question, ask_scripts=ask_scripts))
            else:
                add(function)
            return function

        return register


def _with_book(
    function: Callable[..., Any], *, check: bool, question: str | None, ask_scripts: bool
) -> Callable[..., None]:
    hints = get_type_hints(function, include_extras=True)
    parameters = [
        each.replace(annotation=hints[name], kind=each.KEYWORD_ONLY)
        for name, each in inspect.signature(function).parameters.items()
        if name != "book"
    ]
    added = [("book", BookOption, None), ("json", JsonOption, False)]
    if question is not None:
        added.insert(0, ("yes", YesOption, False))
    for name, annotation, default in added:
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )

    @wraps(function)
    def command(*, book: str | None, json: bool, **given: Any) -> None:
        async def open_and_call() -> None:
            if hints["book"] is not Book:
                await function(book=book, **given)
                return
            async with open_book(book) as opened:
                await function(book=opened, **given)

        output.choose(json=json, check=check)
        if question is not None:  # outside the event loop, as `confirm` requires
            yes = given.pop("yes")
            confirm(question.format(**given), yes=yes, scripts=ask_scripts)
        if inspect.iscoroutinefunction(function):
            run(open_and_call())
        else:
            function(book=book, **given)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def run(
    coroutine: Coroutine[Any, Any, None], *, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> None:
    """Run a coroutine; of the errors of a task group, raise the first unexpected one, or else the first."""
    try:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(coroutine)
    except BaseExceptionGroup as group:
        leaves = list(_leaves(group))
        raise next((each for each in leaves if not isinstance(each, TidebookError)), leaves[0]) from group


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for each in group.exceptions:
        if isinstance(each, BaseExceptionGroup):
            yield from _leaves(each)
        else:
            yield each


@contextmanager
def stop_on_signals(stop: Callable[[], object]) -> Iterator[None]:
    """Call `stop` at the first SIGINT or SIGTERM; exit immediately at the second.

    After the first, the body of the `with` block finishes its current work and returns. The exit code is then 130
    after SIGINT, as for every interrupted command, and 0 after SIGTERM, which a supervisor sends to stop a service.
    `stop` runs in a signal handler in the main thread; within an event loop, use `stop_loop_on_signals`.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if received:  # a server may hang; exiting here is as safe as a crash
            os._exit(128 + number)
        received.append(number)
        stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if signal.SIGINT in received:
        raise typer.Exit(INTERRUPTED)


def stop_loop_on_signals(stop: Callable[[], object]) -> AbstractContextManager[None]:
    """Do what `stop_on_signals` does, but call `stop` in the running event loop instead of in the signal handler."""
    loop = asyncio.get_running_loop()
    return stop_on_signals(lambda: loop.call_soon_threadsafe(stop))
