"""`tidebook run`: run the parts of an application with its book, under one supervisor."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext, suppress

import msgspec
import typer

from tidebook.cli import output
from tidebook.cli.command import stop_loop_on_signals
from tidebook.cli.options import (
    BookOption,
    LogJsonOption,
    MetricsOption,
    application_parts,
    argument,
    book_settings,
    load_callable,
    seconds,
)
from tidebook.core.errors import InvalidInput
from tidebook.runtime.json_log import log_as_json
from tidebook.runtime.metrics import serve_metrics
from tidebook.runtime.supervisor import GRACE_S, RunStatus, Supervisor
from tidebook.wiring.book import Book
from tidebook.wiring.replication import is_embedded

#: The interval at which the states of the parts are checked, and changes are printed.
REPORT_S = 0.5


async def run_app(
    book: BookOption,
    app: str = argument("MODULE:APP", "A function that takes the book and returns what to run, such as shop.main:app"),
    replicate: bool = typer.Option(True, help="Replicate an embedded book in this process."),
    grace_s: float = seconds("Give running jobs this long to finish after a signal.", default=GRACE_S),
    metrics: MetricsOption = None,
    log_json: LogJsonOption = False,
) -> None:
    """Run an application's feeds, workers, relays and projections.

    APP receives the book and returns a part or a list of them; it may be async, or an async context manager. A part
    that fails is restarted. The first SIGINT or SIGTERM lets running jobs finish; a second one exits immediately.
    """
    if log_json:
        log_as_json()
    make = load_callable(app)
    settings = book_settings(book, create=True)
    stop = asyncio.Event()
    async with Book(settings, replicate=replicate and is_embedded(settings)) as opened:
        with (
            serve_metrics(opened.metrics, metrics) if metrics is not None else nullcontext(),
            stop_loop_on_signals(stop.set),
        ):
            async with application_parts(make, opened) as parts:
                if not parts or parts == [None]:
                    raise InvalidInput(
                        f"{app} returned nothing to run: return a list, as in [book.feed('paid', 'mail')]"
                    )
                async with opened.running(*parts, grace_s=grace_s) as running:
                    output.note(f"running {app}; press Ctrl-C to stop")
                    await _report_until(stop, running)


async def _report_until(stop: asyncio.Event, running: Supervisor) -> None:
    """Print each state that has changed; return at `stop`, or when every part has ended."""
    shown: dict[str, RunStatus] = {}
    while not stop.is_set():
        statuses = running.status()
        for each in statuses:
            if each != shown.get(each.name):
                shown[each.name] = each
                error = "" if each.last_error is None else f" after {each.failures:,} failures: {each.last_error}"
                output.emit(msgspec.structs.asdict(each), f"{each.name}: {each.state}{error}")
        if all(each.state == "ended" for each in statuses):
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), REPORT_S)
