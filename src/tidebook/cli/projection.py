"""`tidebook projection`: list, status, rebuild, pause, resume and skip the projections of an application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from tidebook.cli import output
from tidebook.cli.command import Group
from tidebook.cli.options import BookOption, application_parts, argument, load_callable, open_book, option
from tidebook.core.errors import InvalidInput, NotFound
from tidebook.wiring.book import Book

if TYPE_CHECKING:  # SQLAlchemy is an extra, and slow to import: only an application that declares projections loads it
    from tidebook.domain.projection import Projection, StoredProjection

app = Group(help="Show, rebuild, pause and resume projections.", no_args_is_help=True)

AppOption = Annotated[
    str, option("MODULE:APP", "A function that takes the book and returns its projections, as for 'tidebook run'.", ...)
]
NameArgument = Annotated[str, argument("NAME", "The projection.", ...)]


@asynccontextmanager
async def _declared(app: str, book: Book) -> AsyncIterator[dict[str, Projection]]:
    """Yield the projections that an application declares, by name."""
    async with application_parts(load_callable(app), book) as parts:
        from tidebook.domain.projection import Projection

        projections = {each.name: each for each in parts if isinstance(each, Projection)}
        if not projections:
            raise InvalidInput(f"{app} returned no projection: return a list of what book.projection(...) returns")
        yield projections


@asynccontextmanager
async def _projection(app: str, name: str, book: Book) -> AsyncIterator[Projection]:
    async with _declared(app, book) as declared:
        if name not in declared:
            raise NotFound(f"{app} declares no projection {name!r}: it declares {', '.join(sorted(declared))}")
        yield declared[name]


def _time(time_ms: int | None) -> str | None:
    return None if time_ms is None else datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")


def _row(found: StoredProjection) -> dict[str, Any]:
    stopped = [each.slice for each in found.slices if each.error is not None]
    state = "paused" if found.paused else "stopped" if stopped else "running" if _owners(found) else "idle"
    return {
        "projection": found.name,
        "state": state,
        "build": found.build,
        "rebuilding": found.rebuilding,
        "applied_to": _time(found.time_ms),
        "processes": len(_owners(found)),
        "slices": len(found.slices),
        "stopped": len(stopped),
        "parked": len(found.parked),
    }


def _owners(found: StoredProjection) -> set[str]:
    return {each.owner for each in found.slices if each.owner is not None}


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['projection']}: {row['state']}, applied to {row['applied_to'] or 'nothing'}, build {row['build']}, "
        f"{row['processes']} processes, {row['slices']} slices, {row['stopped']} stopped, {row['parked']} parked"
    )


@app.command("list")
async def list_(book: Book, app: AppOption) -> None:
    """List the projections of an application."""
    names = ("state", "build", "rebuilding", "applied_to", "processes", "slices", "stopped", "parked")
    table = output.Table("projection", *(name.replace("_", " ") for name in names))
    async with _declared(app, book) as declared:
        for name, each in sorted(declared.items()):
            try:
                row = _row(await each.stored())
            except NotFound:
                row = {"projection": name, "state": "never started"}
            cells = row | {"rebuilding": "yes" if row.get("rebuilding") else None}
            table.add(row, name, *map(cells.get, names))
    table.print("no projections")


@app.command()
async def status(book: Book, name: NameArgument, app: AppOption) -> None:
    """Print the progress of a projection, and what failed."""
    async with _projection(app, name, book) as projection:
        found = await projection.stored()
    row = _row(found)
    slices = [msgspec.structs.asdict(each) | {"applied_to": _time(each.time_ms)} for each in found.slices]
    parked = [msgspec.structs.asdict(each) for each in found.parked]
    lines = [_line(row)]
    stopped = [each for each in found.slices if each.error is not None]
    lines += (f"  slice {each.slice} is stopped at {each.failed_event}: {each.error}" for each in stopped)
    lines += (f"  parked {each.event}: {each.error}" for each in found.parked)
    output.emit(row | {"slice_states": slices, "parked_events": parked}, "\n".join(lines))


@app.command()
async def rebuild(book: BookOption, name: NameArgument, app: AppOption) -> None:
    """Rebuild a projection, then swap its tables.

    It replicates an embedded book meanwhile. With servers it waits for the pipeline.
    """
    async with open_book(book, replicate=True) as opened, _projection(app, name, opened) as projection:
        build = await projection.rebuild()
    output.emit({"projection": name, "build": build}, f"{name}: build {build} is live")


@app.command()
async def pause(book: Book, name: NameArgument, app: AppOption) -> None:
    """Pause a projection in all processes, within seconds."""
    async with _projection(app, name, book) as projection:
        await projection.pause()
    output.emit({"projection": name, "paused": True}, f"{name}: paused")


@app.command()
async def resume(book: Book, name: NameArgument, app: AppOption) -> None:
    """Continue a paused projection, and retry what stopped its slices."""
    async with _projection(app, name, book) as projection:
        events = await projection.resume()
    again = f", retrying {', '.join(events)}" if events else ""
    output.emit({"projection": name, "paused": False, "retried": events}, f"{name}: resumed{again}")


@app.command()
async def skip(book: Book, name: NameArgument, app: AppOption) -> None:
    """Skip and park the events that stopped slices, then resume."""
    async with _projection(app, name, book) as projection:
        events = await projection.skip()
    output.emit({"projection": name, "skipped": events}, f"{name}: skipped {', '.join(events) or 'nothing'}")
