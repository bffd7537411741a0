"""HTTP requests to the server, compared with the same work in process: appends, batches, reads, followers, queues.

The clients are bare asyncio connections on uvloop in another process than the server, because on two cores heavier
clients would be measured instead of it. The benchmark also prints the CPU time per request of the server's event loop
and of its other threads, which other load affects less than it affects rates.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import uvicorn

from bench.timing import percentile, report, timed
from tidebook import Event
from tidebook.api.access import Role
from tidebook.api.route import Route
from tidebook.queue.job import Job
from tidebook.server.app import ServerApp
from tidebook.server.protocol import BoundedProtocol
from tidebook.server.serve import collect_garbage_rarely, new_event_loop
from tidebook.server.state import ServerState
from tidebook.wiring.book import open as open_book
from tidebook.wiring.book import open_remote

EMPTY = "/v1/bench/empty"
PARTS = ("append", "batch", "read", "sse", "queue")
TARGETS = {
    "append_vs_empty_post": 0.5,
    "batch_vs_append_many": 0.4,
    "read_vs_in_process": 0.4,
    "first_byte_vs_first_event": 2.0,
    "sse_p50_ms": 100.0,
    "queue_vs_in_process": 0.4,
}
CLIENTS, QUEUE_CLIENTS, FOLLOWERS = 64, 32, 1_000
PAYLOAD = {"total": 3, "currency": "EUR", "lines": [{"sku": "a-1", "n": 2}, {"sku": "b-7", "n": 1}]}
EVENT = {"payload": PAYLOAD}


def main(argv: list[str]) -> None:
    """Run all parts, or some, and print the ratios."""
    parser = argparse.ArgumentParser(prog="bench server", description=__doc__)
    parser.add_argument("--only", action="append", choices=PARTS, metavar="PART", help=f"one of: {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="a fifth of the work")
    options = parser.parse_args(argv)
    collect_garbage_rarely()  # as in the server, so that the work in process has the same advantage
    figures: dict[str, float] = {}
    scale = 5 if options.quick else 1
    for part in options.only or PARTS:
        print(f"{part}:", file=sys.stderr)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:  # uvloop in this process too, as in the server
            runner.run(_PARTS[part](figures, scale))
    report("server", _ratios(figures), {name: round(value, 3) for name, value in figures.items()}, TARGETS)


def _ratios(figures: dict[str, float]) -> dict[str, float]:
    pairs = {
        "append_vs_empty_post": ("append_per_s", "empty_post_per_s"),
        "append_vs_bare_function": ("append_per_s", "bare_function_per_s"),
        "batch_vs_append_many": ("batch_appends_per_s", "append_many_per_s"),
        "read_vs_in_process": ("read_events_per_s", "in_process_read_events_per_s"),
        "first_byte_vs_first_event": ("first_byte_ms", "in_process_first_event_ms"),
        "queue_vs_in_process": ("queue_jobs_per_s", "in_process_queue_jobs_per_s"),
        "queue_vs_in_process_one_call": ("queue_jobs_per_s", "in_process_queue_one_call_jobs_per_s"),
    }
    found = {name: figures[a] / figures[b] for name, (a, b) in pairs.items() if a in figures}
    return found | ({"sse_p50_ms": figures["sse_p50_ms"]} if "sse_p50_ms" in figures else {})


class Connection:
    """A keep-alive connection that can also read chunked responses and streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        """Connect to the server."""
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=2**24))

    def send(self, method: str, path: str, body: bytes = b"") -> None:
        """Send a request."""
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self.writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    async def head(self) -> tuple[int, int]:
        """Read the head of a response; return its status and its length, -1 if it is chunked."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        _, found, rest = head.lower().partition(b"content-length:")
        status = int(head[9:12])
        return status, int(rest.split(b"\r", 1)[0]) if found else 0 if status == 204 else -1

    async def call(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Send a request and return the body of the response."""
        self.send(method, path, body)
        status, length = await self.head()
        answer = await self.reader.readexactly(length) if length > 0 else b"" if length == 0 else await self.chunks()
        assert status < 300, (status, answer)
        return answer

    async def chunks(self) -> bytes:
        """Read a chunked body."""
        parts: list[bytes] = []
        while size := int(await self.reader.readline(), 16):
            parts.append(await self.reader.readexactly(size))
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return b"".join(parts)


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[int, int]]:
    """Run `tidebook serve`; yield its port and its process id."""
    command = [sys.executable, "-m", "tidebook.cli", "serve", "--json", "--port", "0", "--book", str(folder)]
    process: subprocess.Popen[str] = await asyncio.to_thread(
        subprocess.Popen, command, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        yield int(url.rpartition(":")[2]), process.pid
    finally:
        process.terminate()
        process.wait(60)


class Caller(asyncio.Protocol):
    """A keep-alive connection for one call at a time, cheaper than `Connection`: clients have one core of two."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._received = b""
        self._answer: asyncio.Future[bytes] | None = None

    @classmethod
    async def open(cls, port: int) -> Caller:
        """Connect to the server."""
        _, caller = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return caller

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Resolve the call when its response is complete."""
        self._received = data = self._received + data
        head, end, body = data.partition(b"\r\n\r\n")
        _, found, rest = head.partition(b"\r\ncontent-length: ")
        if not end or (found and len(body) < int(rest.partition(b"\r")[0])):
            return
        self._received = b""
        assert self._answer is not None
        assert head[9:10] == b"2", data
        self._answer.set_result(body)

    def call(self, method: str, path: str, body: bytes = b"") -> asyncio.Future[bytes]:
        """Send a request and return the body of its response."""
        self._answer = asyncio.get_running_loop().create_future()
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self._transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        return self._answer

    def connection_lost(self, error: Exception | None) -> None:
        """Fail the call, unless it is over."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error or ConnectionResetError("the server has closed the connection"))

    def close(self) -> None:
        """Disconnect."""
        self._transport.close()


class Cpu:
    """The CPU time of a process, on Linux: that of its event loop, which is the main thread, and of the others."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = self._read()

    def _read(self) -> dict[int, int]:
        tasks = [int(each.name) for each in Path(f"/proc/{self._pid}/task").glob("*")]
        return {task: int(Path(f"/proc/{self._pid}/task/{task}/schedstat").read_text().split()[0]) for task in tasks}

    def report(self, figures: dict[str, float], name: str, total: int) -> None:
        """Add the microseconds per request, of `total` requests since this object was created."""
        if not Path("/proc/self/schedstat").exists():
            return
        spent = {task: ns - self._before.get(task, 0) for task, ns in self._read().items()}
        figures[f"{name}_loop_cpu_us"] = spent.pop(self._pid) / total / 1000
        figures[f"{name}_threads_cpu_us"] = sum(spent.values()) / total / 1000


async def clients(port: int, count: int, total: int, call: Callable[[Caller, int], Awaitable[Any]]) -> float:
    """Make `total` calls with this many clients; return the calls per second."""
    connections = [await Caller.open(port) for _ in range(count)]
    numbers = iter(range(total))

    async def work(connection: Caller) -> None:
        for number in numbers:
            await call(connection, number)

    began = time.perf_counter()
    await asyncio.gather(*(work(each) for each in connections))
    rate = total / (time.perf_counter() - began)
    for each in connections:
        each.close()
    return rate


async def empty_posts(
    figures: dict[str, float], name: str, target: Callable[[Any], None], path: str, total: int
) -> None:
    """Measure the rate of empty POSTs to a server that `target` runs in a process."""
    port_of: multiprocessing.Queue[int] = multiprocessing.get_context("spawn").Queue()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(port_of,), daemon=True)
    process.start()
    port = await asyncio.to_thread(port_of.get)
    await clients(port, CLIENTS, total // 10, lambda each, _: each.call("POST", path))  # warms up
    assert process.pid is not None
    cpu = Cpu(process.pid)
    figures[f"{name}_per_s"] = await clients(port, CLIENTS, total, lambda each, _: each.call("POST", path))
    cpu.report(figures, name, total)
    process.terminate()
    process.join()


def serve_function(port_of: Any) -> None:
    """Serve an ASGI function with an empty response, on the same uvicorn, httptools and uvloop."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(app, port_of))


def serve_empty_route(port_of: Any) -> None:
    """Serve a book with another route for empty POSTs, so that router, gate, limits and metrics are in use."""
    route = Route(
        name="bench.empty", method="POST", path=EMPTY, role=Role.OPERATOR, scope="none", summary="", status=204
    )

    async def empty(call: Any) -> None:
        return None

    async def run() -> None:
        with tempfile.TemporaryDirectory(prefix="tidebook-bench-") as folder:
            async with open_book(Path(folder) / "book", create=True) as book:
                state = ServerState(book)
                state.start()
                await _serve(
                    ServerApp(state, more=[(route, empty)]), port_of, http=BoundedProtocol, proxy_headers=False
                )

    # uvicorn ends at SIGTERM and then raises it again, which must not prevent the removal of the folder.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    collect_garbage_rarely()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run())


async def _serve(app: Any, port_of: Any, **options: Any) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    options = {"http": "httptools", **options}
    config = uvicorn.Config(app, lifespan="off", ws="none", access_log=False, log_level="error", **options)
    port_of.put(listening.getsockname()[1])
    await uvicorn.Server(config).serve([listening])


async def append(figures: dict[str, float], scale: int) -> None:
    """Measure 64 clients with one event per request, and the same number of empty requests before and after."""
    total = 40_000 // scale
    body = msgspec.json.encode({"events": [EVENT]})
    with tempfile.TemporaryDirectory(prefix="tidebook-bench-") as folder:
        async with serving(Path(folder) / "book") as (port, pid):

            async def call(connection: Caller, number: int) -> None:
                await connection.call("POST", f"/v1/journals/bench/j-{number % 500}/events", body)

            await clients(port, CLIENTS, total // 10, call)  # warms up
            cpu = Cpu(pid)
            with timed("appends"):
                figures["append_per_s"] = await clients(port, CLIENTS, total, call)
            cpu.report(figures, "append", total)
    with timed("empty posts, the same server"):
        await empty_posts(figures, "empty_post", serve_empty_route, EMPTY, total)
    with timed("empty posts, a bare function"):
        await empty_posts(figures, "bare_function", serve_function, "/", total)


async def batch(figures: dict[str, float], scale: int) -> None:
    """Measure appends of 100 by 8 clients, and `append_many` of 100 in process by 8 tasks."""
    total = 2_000 // scale
    appends = [{"id": f"j-{n}", "events": [EVENT]} for n in range(100)]
    body = msgspec.json.encode({"appends": appends})
    with tempfile.TemporaryDirectory(prefix="tidebook-bench-") as folder:
        async with serving(Path(folder) / "book") as (port, _):

            async def call(connection: Caller, number: int) -> None:
                await connection.call("POST", "/v1/journals/bench", body)

            await clients(port, 8, 50, call)
            with timed("batches"):
                figures["batch_appends_per_s"] = 100 * await clients(port, 8, total, call)
        async with open_book(Path(folder) / "other", create=True) as book:
            journal, numbers = book.journal("bench"), iter(range(total))

            async def work() -> None:
                for _ in numbers:
                    await journal.append_many([(f"j-{n}", [Event(PAYLOAD)]) for n in range(100)])

            await journal.append_many([(f"j-{n}", [Event(PAYLOAD)]) for n in range(100)])
            with timed("append_many") as watch:
                await asyncio.gather(*(work() for _ in range(8)))
            figures["append_many_per_s"] = watch.rate(total * 100)


async def read(figures: dict[str, float], scale: int) -> None:
    """Measure a read of 10,000 events as NDJSON, decoded into events, and the same read in process."""
    count, rounds = 10_000, 20 // scale
    with tempfile.TemporaryDirectory(prefix="tidebook-bench-") as folder:
        async with open_book(Path(folder) / "book", create=True) as book:
            for _ in range(count // 100):
                await book.journal("bench").append("long", [Event(PAYLOAD) for _ in range(100)])
            firsts, seconds, events = [], [], 0
            for _ in range(rounds):
                began = time.perf_counter()
                events, first = 0, 0.0
                async for _ in book.journal("bench").read("long"):
                    first = first or time.perf_counter() - began
                    events += 1
                firsts.append(first)
                seconds.append(time.perf_counter() - began)
            assert events == count
        figures["in_process_first_event_ms"] = percentile(firsts, 0.5) * 1000
        figures["in_process_read_events_per_s"] = count / percentile(seconds, 0.5)
        async with serving(Path(folder) / "book") as (port, _):
            await _read_over_http(figures, port, count, rounds)


async def _read_over_http(figures: dict[str, float], port: int, count: int, rounds: int) -> None:
    async with open_remote(f"http://127.0.0.1:{port}") as book:
        firsts, seconds = [], []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            found, first = 0, 0.0
            async for _ in book.journal("bench").read("long"):
                first = first or time.perf_counter() - began
                found += 1
            assert found == count
            firsts.append(first)
            seconds.append(time.perf_counter() - began)
    figures["remote_first_event_ms"] = percentile(firsts[1:], 0.5) * 1000
    figures["read_events_per_s"] = count / percentile(seconds[1:], 0.5)
    connection = await Connection.open(port)
    firsts = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        connection.send("GET", "/v1/journals/bench/long/events")
        await connection.head()
        await connection.reader.readexactly(1)
        firsts.append(time.perf_counter() - began)
        while not (await connection.reader.readline()).startswith(b'{"end"'):
            pass
        await connection.reader.readuntil(b"0\r\n\r\n")
    figures["first_byte_ms"] = percentile(firsts[1:], 0.5) * 1000


async def sse(figures: dict[str, float], scale: int) -> None:
    """Measure 1,000 followers of a journal: the latency from an append to each, and the memory per follower."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(65_536, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
    rounds = 30 // scale
    path = "/v1/journals/bench/live/events"
    with tempfile.TemporaryDirectory(prefix="tidebook-bench-") as folder:
        async with serving(Path(folder) / "book") as (port, pid):
            writer = await Connection.open(port)
            await writer.call("POST", path, msgspec.json.encode({"events": [EVENT]}))
            before = _memory_bytes(pid)
            followers = []
            for _ in range(FOLLOWERS):
                connection = await Connection.open(port)
                connection.send("GET", f"{path}?follow=true&start=2")
                await connection.reader.readuntil(b"retry: 2000\n\n")
                followers.append(connection)
            figures["memory_per_follower_kb"] = (_memory_bytes(pid) - before) / FOLLOWERS / 1000
            delays: list[float] = []

            async def receive(connection: Connection) -> float:
                await connection.reader.readuntil(b"data: ")
                at = time.perf_counter()
                await connection.reader.readuntil(b"\n\n\r\n")
                return at

            for _ in range(rounds):
                waiting = [asyncio.create_task(receive(each)) for each in followers]
                await asyncio.sleep(0.1)
                began = time.perf_counter()
                await writer.call("POST", path, msgspec.json.encode({"events": [EVENT]}))
                delays += [at - began for at in await asyncio.gather(*waiting)]
            figures["sse_p50_ms"] = percentile(delays, 0.5) * 1000
            figures["sse_p99_ms"] = percentile(delays, 0.99) * 1000
            for each in followers:
                each.writer.close()


def _memory_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def queue(figures: dict[str, float], scale: int) -> None:
    """Measure 32 workers that claim one entry and finish it, over HTTP and in process."""
    total = 8_000 // scale
    with tempfile.TemporaryDirectory(prefix="tidebook-bench-") as folder:
        for name in ("book", "other"):
            async with open_book(Path(folder) / name, create=True) as book:
                for _ in range(total // 1000 + 1):
                    await book.queue("bench").put_many([PAYLOAD] * 1000)
        async with serving(Path(folder) / "book") as (port, pid):

            async def call(connection: Caller, number: int) -> None:
                claimed = await connection.call("POST", "/v1/queues/bench/claims", b'{"together":false}')
                answer = msgspec.json.decode(claimed)
                body = msgspec.json.encode({"leases": [job["lease"] for job in answer["jobs"]]})
                await connection.call("POST", "/v1/queues/bench/done", body)

            with timed("claim and done over HTTP"):
                figures["queue_two_calls_jobs_per_s"] = await clients(port, QUEUE_CLIENTS, total // 2, call)
            held: dict[Caller, list[str]] = {}

            async def claim_and_finish(connection: Caller, number: int) -> None:
                body = msgspec.json.encode({"together": False, "done": held.get(connection, [])})
                answer = msgspec.json.decode(await connection.call("POST", "/v1/queues/bench/claims", body))
                held[connection] = [job["lease"] for job in answer["jobs"]]

            cpu = Cpu(pid)
            with timed("claims that finish the job before"):
                figures["queue_jobs_per_s"] = await clients(port, QUEUE_CLIENTS, total // 2, claim_and_finish)
            cpu.report(figures, "queue", total // 2)
        async with open_book(Path(folder) / "other") as book:
            jobs, numbers = book.queue("bench"), iter(range(total // 2))

            async def work() -> None:
                for _ in numbers:
                    await jobs.done(await jobs.claim(1, together=False))

            cpu = Cpu(os.getpid())
            with timed("claim and done in process") as watch:
                await asyncio.gather(*(work() for _ in range(QUEUE_CLIENTS)))
            figures["in_process_queue_jobs_per_s"] = watch.rate(total // 2)
            cpu.report(figures, "in_process_queue", total // 2)
            numbers = iter(range(total // 2))

            async def work_in_one_call() -> None:
                finished: list[Job[Any]] = []
                for _ in numbers:
                    finished = await jobs.claim(1, together=False, finished=finished)

            cpu = Cpu(os.getpid())
            with timed("claims in process that finish the job before") as watch:
                await asyncio.gather(*(work_in_one_call() for _ in range(QUEUE_CLIENTS)))
            figures["in_process_queue_one_call_jobs_per_s"] = watch.rate(total // 2)
            cpu.report(figures, "in_process_queue_one_call", total // 2)


_PARTS: dict[str, Callable[[dict[str, float], int], Coroutine[Any, Any, None]]] = {
    "append": append,
    "batch": batch,
    "read": read,
    "sse": sse,
    "queue": queue,
}
