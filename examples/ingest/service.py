"""Write measurements over HTTP into a write-ahead log: `uvicorn examples.ingest.service:app`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from zlib import crc32

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import tidebook
from tidebook import Fenced

NAMESPACE, REGION = "ingest", 1
#: Series are spread over this many tables, so that each can be flushed and deleted separately.
TABLES = 16


class Measurement(msgspec.Struct):
    """One line of a request."""

    series: str
    value: float


class Ingest:
    """A region that this process owns, and the last value of each series."""

    def __init__(self, book: tidebook.Book) -> None:
        self._book = book
        self.last: dict[str, float] = {}

    async def open(self) -> None:
        """Claim the region, and rebuild the last values from the entries that the log still has."""
        self.region = await self._book.wal(NAMESPACE).open_region(REGION, create=True)
        async for entry in self.region.read():
            self._apply(msgspec.json.decode(entry.payload, type=Measurement))

    async def write(self, lines: list[Measurement]) -> None:
        """Write the lines of a request, all of them or none; they are durable when this returns."""
        tables: dict[int, list[bytes]] = {}
        for line in lines:
            tables.setdefault(crc32(line.series.encode()) % TABLES + 1, []).append(msgspec.json.encode(line))
        await self.region.write_many([*tables.items()])
        for line in lines:
            self._apply(line)

    def _apply(self, line: Measurement) -> None:
        self.last[line.series] = line.value


async def measurements(request: Request) -> Response:
    """Accept lines of JSON; answer 204 when they are durable."""
    try:
        lines = msgspec.json.Decoder(Measurement).decode_lines(await request.body())
    except msgspec.MsgspecError as error:
        return JSONResponse({"error": str(error)}, status_code=400)
    try:
        if lines:
            await request.app.state.ingest.write(lines)
    except Fenced as error:
        return JSONResponse({"error": str(error)}, status_code=503)
    return Response(status_code=204)


async def series(request: Request) -> Response:
    """Return the last value of a series."""
    value = request.app.state.ingest.last.get(request.path_params["name"])
    return JSONResponse({"value": value}, status_code=404 if value is None else 200)


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    """Open the book when the server starts, and close it when the server ends."""
    async with tidebook.open(os.environ.get("INGEST_BOOK", "./ingest-data")) as book:
        app.state.ingest = Ingest(book)
        await app.state.ingest.open()
        yield
        await app.state.ingest.region.close()


ROUTES = [Route("/measurements", measurements, methods=["POST"]), Route("/series/{name}", series)]
app = Starlette(routes=ROUTES, lifespan=lifespan)
