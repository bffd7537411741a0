"""`tidebook up`: replicate a book, serve it and show its live status until Ctrl-C."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import nullcontext
from pathlib import Path
from shlex import quote
from shutil import which
from typing import TYPE_CHECKING, Any

import typer

from tidebook.cli import output
from tidebook.cli.command import stop_loop_on_signals
from tidebook.cli.options import PORT_MAX, BookOption, LogJsonOption, book_settings, flag, number, option
from tidebook.cli.topics import checked_description
from tidebook.core.errors import InvalidInput, TidebookError, Unavailable
from tidebook.pipeline.jars import missing_for_spark
from tidebook.pipeline.jobs.purge import purge_expired
from tidebook.pipeline.session import choose_engine, pipeline_settings
from tidebook.runtime.backoff import Backoff
from tidebook.runtime.json_log import log_as_json
from tidebook.wiring.adapters import extra
from tidebook.wiring.book import Book
from tidebook.wiring.replication import is_embedded
from tidebook.wiring.settings import DEFAULT_BOOK, Settings
from tidebook.wiring.topics import TopicDescription

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

RESTART_FIRST_S = 1.0
RESTART_MAX_S = 60.0
STOP_S = 20.0
ERROR_CHARS_MAX = 300


async def up(
    book: BookOption,
    every_s: float = option("SECONDS", "Refresh the status at this interval.", 1.0, min=0.05),
    once: bool = flag("--once", "Print the status once, then exit."),
    replicate: bool = typer.Option(True, help="Replicate the log to the store, and purge expired journals."),
    serve: bool = typer.Option(True, help="Serve the book over HTTP on loopback."),
    port: int = number(
        "The port of the server; if it is taken, another one is chosen.", 0, PORT_MAX, 8470, metavar="PORT"
    ),
    log_json: LogJsonOption = False,
    demo: bool = flag("--demo", "Also run a demo in the book: a small shop that uses every part of Tidebook."),
) -> None:
    """Replicate and serve a book, and show its status, until Ctrl-C.

    An embedded book is replicated in this process. A book with servers, or with [pipeline] engine = "spark", is
    replicated with Spark, by a child process.
    """
    if log_json:
        log_as_json()
    settings = book_settings(book, create=True)
    shop = _demo(settings, once=once) if demo else None
    runs_jobs = replicate and not once
    engine = choose_engine(settings) if runs_jobs else None
    async with Book(settings, create=True, replicate=engine == "inline") as opened:
        where = opened.settings.folder.resolve()
        if output.human():
            example = f"{_command()} journal append orders o-1 '{{\"total\": 3}}' --book {quote(str(where))}"
            stopping = "" if once else " Press Ctrl-C to stop; no data is lost."
            output.write(f"Tidebook is open in {where}.{stopping}\n")
            output.write(f"Try{'' if once else ' in another terminal'}:\n  {example}\n")
        else:
            output.emit({"open": str(where)})
        stop = asyncio.Event()
        with stop_loop_on_signals(stop.set):
            async with asyncio.TaskGroup() as group:
                child: ReplicationChild | None = None
                if engine == "spark":  # first, because it takes the longest to start
                    child = ReplicationChild(DEFAULT_BOOK if book is None else book, opened.settings.folder)
                    group.create_task(child.run(stop))
                if serve and not once:
                    group.create_task(_serve(opened, stop, DEFAULT_BOOK if book is None else book, port))
                if runs_jobs:
                    group.create_task(_purge_periodically(opened, stop))
                if shop is not None:
                    group.create_task(_run_demo(opened, shop, stop))
                try:
                    await _watch(opened, stop, every_s, child, once=once)
                finally:
                    stop.set()


def _demo(settings: Settings, *, once: bool) -> Any:
    """Return the function that opens the demo shop; raise `InvalidInput` if the shop cannot run."""
    if once or not is_embedded(settings):
        raise InvalidInput("--demo runs in an embedded book until Ctrl-C: pass a folder, and not --once")
    return extra("tidebook.demo", "outbox").shop


async def _run_demo(book: Book, shop: Any, stop: asyncio.Event) -> None:
    async with shop(book) as parts, book.running(*parts):
        output.emit({"demo": "shop"}, "The demo shop is open: its topics begin with shop-")
        await stop.wait()


async def _serve(book: Book, stop: asyncio.Event, where: str, port: int) -> None:
    """Serve the book until `stop` is set, on a free port if `port` is taken; print the address."""
    try:
        server = extra("tidebook.server.serve", "server")
    except InvalidInput as error:
        output.note(f"tidebook: not served over HTTP: {error}")
        return

    def ready(url: str) -> None:
        output.emit({"url": url}, f"The book is served at {url}")

    try:
        await server.serve(book, stop, port=port, where=where, on_ready=ready)
    except Unavailable:  # another program listens there
        await server.serve(book, stop, port=0, where=where, on_ready=ready)


def _command() -> str:
    """Return the command that runs this installation from a terminal in the same folder without an active venv."""
    script = Path(sys.executable).with_name("tidebook")
    if script.is_relative_to(Path.cwd()):
        return quote(str(script.relative_to(Path.cwd())))
    return "tidebook" if which("tidebook") else quote(str(script))


async def _watch(
    book: Book, stop: asyncio.Event, every_s: float, child: ReplicationChild | None, *, once: bool
) -> None:
    shown: dict[str, Any] | None = None
    with _live() if output.human() else nullcontext() as live:
        while not stop.is_set():
            statuses = [await checked_description(book, topic) for topic in await book.topics()]
            replication = _describe_replication(book, child)
            if live is not None:
                live.update(_table(statuses, replication), refresh=True)
            else:
                names = ("topic", "epoch", "partitions", "records", "lag")
                rows = [{name: getattr(status, name) for name in names} for status in statuses]
                found = {"topics": rows, **replication}
                if found != shown:
                    shown = found
                    output.emit(found)
            if once or await _wait_for(stop, every_s):
                return


def _describe_replication(book: Book, child: ReplicationChild | None) -> dict[str, str]:
    """Return the engine and its state as one line of text; nothing if this command does not replicate."""
    if child is not None:
        return {"engine": "spark", "replication": child.state}
    if book.replication is not None:
        return {"engine": "inline", "replication": book.replication.status().describe()}
    return {}


def _live() -> Live:
    # Rich is imported only where it is used: the import takes a fifth of a command's start-up time.
    from rich.console import Console
    from rich.live import Live

    return Live(console=Console(highlight=False), auto_refresh=False)


def _table(statuses: list[TopicDescription], replication: dict[str, str]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title="Journals", title_justify="left", caption_justify="left")
    captions = [] if statuses else ["There is no topic yet: the first append creates one."]
    if replication:
        captions.append(f"Replication ({replication['engine']}): {replication['replication']}")
    if captions:  # not markup: the text may contain brackets
        table.caption = Text("\n".join(captions), style="table.caption")
    table.add_column("topic")
    for name in ("partitions", "records in the log", "not replicated yet"):
        table.add_column(name, justify="right")
    for status in statuses:
        table.add_row(status.topic, f"{status.partitions:,}", f"{status.records:,}", f"{status.lag:,}")
    return table


class ReplicationChild:
    """Runs `tidebook pipeline replicate` as a child process; restarts it when it dies, and stops it at the end."""

    def __init__(self, where: str, folder: Path) -> None:
        self._where = where
        self._log = folder / "replicate.log"
        #: The current state as one line of text.
        self.state = "starting"

    async def run(self, stop: asyncio.Event) -> None:
        """Run the child, and restart it with a growing pause, until `stop` is set."""
        if (missing := missing_for_spark()) is not None:
            self.state = f"off (reads and appends still work): {missing}"
            await stop.wait()
            return
        backoff = Backoff(first_s=RESTART_FIRST_S, max_s=RESTART_MAX_S)
        while not stop.is_set():
            self.state = "starting Spark"
            code = await self._run_child(stop)
            if stop.is_set():
                return
            pause_s = backoff.next_s()
            self.state = f"exited with code {code}, restarting in {pause_s:.0f} s: {self._last_log_line()}"
            if await _wait_for(stop, pause_s):
                return

    async def _run_child(self, stop: asyncio.Event) -> int | None:
        command = ["pipeline", "replicate", "--until-input-ends", "--json", "--book", self._where]
        with self._log.open("ab") as errors:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tidebook.cli", *command),
                stdin=PIPE, stdout=PIPE, stderr=errors, start_new_session=True, limit=2**24,
            )  # fmt: skip
        reading = asyncio.create_task(self._read(child))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([reading, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            await _stop_child(child)
            reading.cancel()
        return child.returncode

    async def _read(self, child: Process) -> None:
        assert child.stdout is not None
        async for _ in child.stdout:
            self.state = "running"

    def _last_log_line(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1][:ERROR_CHARS_MAX] if lines else ""


async def _stop_child(child: Process) -> None:
    """Close the child's input, which asks it to stop; after a timeout terminate it, and then kill it."""
    if child.stdin is not None:
        child.stdin.close()
    for act in (None, child.terminate, child.kill):
        if act is not None and child.returncode is None:
            act()
        try:
            await asyncio.wait_for(child.wait(), STOP_S)
            return
        except TimeoutError:
            continue


async def _purge_periodically(book: Book, stop: asyncio.Event) -> None:
    every_s = pipeline_settings(book.settings).purge_every_s
    while not stop.is_set():
        try:
            async for found in purge_expired(book):
                book.metrics.count("pipeline_expired_purged", int(found.purged), topic=found.topic)
        except TidebookError:
            book.metrics.count("pipeline_purge_failures")  # the next round retries the same journals
        if await _wait_for(stop, every_s):
            return


async def _wait_for(stop: asyncio.Event, within_s: float) -> bool:
    """Wait at most `within_s` seconds for `stop`; return True if it is set."""
    try:
        await asyncio.wait_for(stop.wait(), within_s)
    except TimeoutError:
        return False
    return True
