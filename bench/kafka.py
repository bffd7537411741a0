"""Journals on Kafka and Cassandra compared with the servers' clients: 200-byte events, one broker, one node.

The two sides of a ratio alternate in many short rounds in one process, in a different order each round. A ratio is the
median of the rounds' ratios; `quartiles` has the first and the third quartile. `./dev bench` starts the servers, unless
they are running or `--book tidebook.toml` names them.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from itertools import cycle, permutations
from typing import Any, NamedTuple

import tidebook
from bench.replication import replicate
from bench.servers import driver_session, status_file
from bench.timing import percentile, report, timed
from tidebook.core.event import Event
from tidebook.journal.append import encode_append
from tidebook.journal.journal import Journal
from tidebook.runtime.clock import RandomIds
from tidebook.wiring.book import Book

BYTES = b"x" * 200
WRITERS = 256
APPENDS_PER_WRITER = 20
PAGE = 1000
#: Rounds in the first seconds are ignored, because the JVM of a broker that has just started still compiles.
WARM_S = 8.0
#: The settings of every client of a comparison; Tidebook's defaults have the same values.
BATCH_BYTES = 1_000_000
PRODUCER = {"acks": "all", "enable.idempotence": True, "linger.ms": 0, "batch.size": BATCH_BYTES}
#: Other processes end after this time, even if this process is killed.
OTHERS_S_MAX = 60
#: A script that uses a whole core until its standard input ends.
BURN = f"""
import os, sys, threading, time
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
began = time.time()
while time.time() - began < {OTHERS_S_MAX}:
    pass
"""
#: A script that appends 10,000 events per second until its standard input ends; it prints the time of its start, then
#: the number of events and the time of its end.
OTHERS = f"""
import asyncio, sys, threading, time
import tidebook
async def main():
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    async with tidebook.open(sys.argv[1]) as book:
        journal, items = book.journal(sys.argv[2]), [(f"o-{{n}}", [tidebook.Event(b"x" * 200)]) for n in range(200)]
        await journal.append_many(items, confirm=False)
        began, count = time.time(), 0
        print(began, flush=True)
        while not stop.is_set() and time.time() - began < {OTHERS_S_MAX}:
            await journal.append_many(items, confirm=False)
            count += len(items)
            await asyncio.sleep(max(0.0, began + count / 10_000 - time.time()))
        print(count, time.time())
asyncio.run(main())
"""
TARGETS = {
    "appends_256_vs_best_async_client": 1.0,
    "appends_256_beside_load_vs_best_async_client": 1.0,
    "append_many_vs_produce_loop": 0.6,
    "append_unconfirmed_p50_vs_produce": 1.5,
    "append_confirmed_p50_vs_produce": 3.0,
    "read_1k_vs_driver": 1.5,
    "read_100k_vs_driver": 1.3,
    "read_1k_in_100k_tail_vs_caught_up": 3.0,
}
PARTS = ("appends", "many", "latency", "reads", "tail", "cold")


def main(argv: list[str]) -> None:
    """Run all parts and print the ratios."""
    parser = argparse.ArgumentParser(prog="bench kafka", description=__doc__)
    parser.add_argument("--book", help="a tidebook.toml that names Kafka and Cassandra")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="run only these parts")
    options = parser.parse_args(argv)
    home = status_file().parent
    bench = Bench(options.book or str(home / "tidebook.toml"), 10 if options.quick else 1)
    asyncio.run(bench.run(options.parts))
    figures = {name: round(value, 4) for name, value in bench.figures.items()}
    report("kafka", bench.ratios, figures | {"quartiles": bench.quartiles}, TARGETS)


class Round(NamedTuple):
    """The cost of a round: its wall time, and the processor time of the loop's thread and of the process."""

    wall_s: float
    loop_s: float
    process_s: float


@contextmanager
def measured(rounds: list[Round]) -> Iterator[None]:
    """Time a block as a round."""
    began = time.perf_counter(), time.thread_time(), time.process_time()
    yield
    ended = time.perf_counter(), time.thread_time(), time.process_time()
    rounds.append(Round(*(end - begin for begin, end in zip(began, ended, strict=True))))


class Side(NamedTuple):
    """One side of a comparison: a round of its work, and a context that is active only during its rounds."""

    work: Callable[[], Awaitable[object]]
    around: Callable[[], AbstractAsyncContextManager[object]] = nullcontext


async def take_turns(
    sides: Mapping[str, Side], rounds: int, *, warm_rounds: int = 1, warm_s: float = 0.0
) -> dict[str, list[Round]]:
    """Measure the sides alternately, in a different order each round, after warm-up rounds."""
    began, number, names = time.monotonic(), 0, list(sides)
    measures: dict[str, list[Round]] = {}
    while number < rounds:
        if number == 0 and (warm_rounds > 0 or time.monotonic() - began < warm_s):
            warm_rounds -= 1
            measures = {name: [] for name in names}
        else:
            number += 1
        names.append(names.pop(0))
        if number % len(names) == 0:
            names.reverse()
        for name in names:
            async with sides[name].around():
                gc.collect()  # so that no side collects the garbage of another
                with measured(measures[name]):
                    await sides[name].work()
    return {name: each[-rounds:] for name, each in measures.items()}


class Bench:
    """One run over new topics."""

    def __init__(self, where: str, scale: int) -> None:
        self.where = where
        self.scale = scale
        self.name = f"bench-{uuid.uuid4().hex[:8]}"
        self.figures: dict[str, float] = {}
        self.ratios: dict[str, float] = {}
        #: The first and the third quartile of the ratios of the rounds.
        self.quartiles: dict[str, list[float]] = {}

    async def run(self, parts: Sequence[str]) -> None:
        async with tidebook.open(self.where) as book:
            servers = str(book.settings.section("log").url).removeprefix("kafka://")
            if "appends" in parts:
                await self.appends(book, servers)
            if "many" in parts:
                await self.many(book, servers)
            if "latency" in parts:
                await self.latency(book, servers)
            if "reads" in parts:
                await self.reads(book)
            if "tail" in parts:
                await self.tail(book)
            for name in ("init", "seek", "poll"):
                timing = book.metrics.timing(f"kafka_consumer_{name}")
                if timing.count:
                    self.figures[f"consumer_{name}_mean_ms"] = timing.total_s / timing.count * 1000
                    self.figures[f"consumer_{name}_count"] = timing.count
        if "cold" in parts:
            self.cold_start()

    def _keep(self, what: str, measures: Mapping[str, Sequence[Round]], count: int) -> None:
        """Keep the medians of each side, in microseconds per operation."""
        for name, rounds in measures.items():
            for kind, seconds in zip(("wall", "loop", "process"), zip(*rounds, strict=True), strict=True):
                self.figures[f"{what}_{name}_{kind}_us"] = percentile(seconds, 0.5) / count * 1e6

    def _compare(self, ratio: str, times: Sequence[float], base: Sequence[float], *, of_rates: bool = False) -> None:
        """Set a ratio of two sides, as the median of the rounds' ratios of times or rates."""
        pairs = zip(base, times, strict=True) if of_rates else zip(times, base, strict=True)
        ratios = [above / below for above, below in pairs]
        self.ratios[ratio] = percentile(ratios, 0.5)
        self.quartiles[ratio] = [round(percentile(ratios, share), 3) for share in (0.25, 0.75)]

    # ---- writing

    async def appends(self, book: Book, servers: str) -> None:
        """Measure 256 writers that each await their append, and other clients that send the same bytes."""
        from aiokafka import AIOKafkaProducer
        from confluent_kafka.aio import AIOProducer

        topic = f"{self.name}-w"
        journal = book.journal(topic)
        await journal.append("warm", [Event(BYTES)], confirm=False)
        record = encode_append(await journal.topic_config(), RandomIds(), [Event(BYTES)])[1]
        aiokafka = AIOKafkaProducer(
            bootstrap_servers=servers, acks="all", enable_idempotence=True, linger_ms=0, max_batch_size=BATCH_BYTES
        )
        await aiokafka.start()
        aioproducer = AIOProducer({"bootstrap.servers": servers, **PRODUCER}, batch_size=WRITERS, buffer_timeout=0.1)

        @asynccontextmanager
        async def polled() -> AsyncIterator[None]:
            """Poll for reports in a busy task, which therefore runs only in its own rounds."""
            ended = False

            async def poll() -> None:
                while not ended:
                    await aioproducer.poll(0.005)

            polling = asyncio.create_task(poll())
            yield
            ended = True
            await polling

        async def ours(id: str) -> None:
            await journal.append(id, [Event(BYTES)], confirm=False)

        async def through_aiokafka(id: str) -> None:
            await aiokafka.send_and_wait(topic, record, key=id.encode())

        async def through_aioproducer(id: str) -> None:
            await (await aioproducer.produce(topic, value=record, key=id.encode()))

        sides = {
            "tidebook": Side(lambda: write_concurrently(ours)),
            "aiokafka": Side(lambda: write_concurrently(through_aiokafka)),
            "aioproducer": Side(lambda: write_concurrently(through_aioproducer), polled),
        }
        try:
            with timed(f"{WRITERS} concurrent writers"):
                alone = await take_turns(sides, 60 // self.scale, warm_s=WARM_S / self.scale)
            self._compare_with_clients("appends_256", alone)
            with timed(f"{WRITERS} concurrent writers under other load"):
                async with other_processes(BURN, count=os.cpu_count() or 1):
                    loaded = await take_turns(sides, 30 // self.scale)
            self._compare_with_clients("appends_256_beside_load", loaded)
        finally:
            await aiokafka.stop()
            await aioproducer.close()

    def _compare_with_clients(self, what: str, measures: Mapping[str, Sequence[Round]]) -> None:
        self._keep(what, measures, WRITERS * APPENDS_PER_WRITER)
        walls = {name: [each.wall_s for each in rounds] for name, rounds in measures.items()}
        ours = walls.pop("tidebook")
        for name, theirs in walls.items():
            self._compare(f"{what}_vs_{name}", ours, theirs, of_rates=True)
        best = min(walls, key=lambda name: self.ratios[f"{what}_vs_{name}"])
        self._compare(f"{what}_vs_best_async_client", ours, walls[best], of_rates=True)

    async def many(self, book: Book, servers: str) -> None:
        from confluent_kafka import Producer

        count = 20_000 // self.scale
        journal = book.journal(f"{self.name}-m")
        await journal.append("warm", [Event(BYTES)], confirm=False)
        record = encode_append(await journal.topic_config(), RandomIds(), [Event(BYTES)])[1]
        items = [(f"k-{n % 1000}", [Event(BYTES)]) for n in range(count)]
        producer = Producer({"bootstrap.servers": servers, **PRODUCER})
        producer.produce(f"{self.name}-m", record)
        producer.flush()  # a new producer can only send after half a second
        done = 0

        def delivered(error: object, _: object) -> None:
            nonlocal done
            assert error is None
            done += 1

        async def bare() -> None:
            before = done
            for n in range(count):
                while True:
                    try:
                        producer.produce(f"{self.name}-m", record, f"k-{n % 1000}".encode(), on_delivery=delivered)
                        break
                    except BufferError:
                        producer.poll(0.01)
                producer.poll(0)
            producer.flush()
            assert done == before + count

        sides = {
            "tidebook": Side(lambda: journal.append_many(items, confirm=False)),
            "produce_loop": Side(bare),
        }
        with timed("append_many, and a bare produce loop with delivery callbacks"):
            measures = await take_turns(sides, 40 // self.scale, warm_s=WARM_S / 2 / self.scale)
        self._keep("append_many", measures, count)
        ours, theirs = ([each.wall_s for each in rounds] for rounds in measures.values())
        self._compare("append_many_vs_produce_loop", ours, theirs, of_rates=True)

    async def latency(self, book: Book, servers: str) -> None:
        from confluent_kafka import Producer

        rounds = 2_000 // self.scale
        journal = book.journal(f"{self.name}-l")
        await journal.append("j", [Event(BYTES)])
        record = encode_append(await journal.topic_config(), RandomIds(), [Event(BYTES)])[1]
        producer = Producer({"bootstrap.servers": servers, **PRODUCER})

        await book.log.create_topic(f"{self.name}-b", 1)  # so that no other writer uses the journal's partition

        async def bare() -> None:
            producer.produce(f"{self.name}-b", record, b"other", partition=0)
            producer.flush()

        async def confirmed() -> None:
            await journal.append("j", [Event(BYTES)])

        async def unconfirmed() -> None:
            await journal.append("j", [Event(BYTES)], confirm=False)

        await bare()
        took: dict[str, list[float]] = {"produce": [], "append_unconfirmed": [], "append_confirmed": []}
        acts = dict(zip(took, (bare, unconfirmed, confirmed), strict=True))
        with timed("lone appends"):
            for number, order in zip(range(-rounds // 10, rounds), cycle(permutations(acts)), strict=False):
                for name in order:
                    seconds = await _took(acts[name])
                    if number >= 0:
                        took[name].append(seconds)
        for name, seconds_of_side in took.items():
            self.figures[f"{name}_p50_ms"] = percentile(seconds_of_side, 0.5) * 1000
        for name in ("append_unconfirmed", "append_confirmed"):
            ratio = f"{name}_p50_vs_produce"
            self.ratios[ratio] = percentile(took[name], 0.5) / percentile(took["produce"], 0.5)
        await self._latency_among_others(journal, rounds // 4)

    async def _latency_among_others(self, journal: Journal, rounds: int) -> None:
        """Measure confirmed appends while another process appends 10,000 per second to the same partitions."""
        async with other_processes(OTHERS, self.where, journal.topic) as [others]:
            assert others.stdout is not None
            began = float(await asyncio.wait_for(others.stdout.readline(), OTHERS_S_MAX))
            took = [await _took(lambda: journal.append("j", [Event(BYTES)])) for _ in range(rounds)]
            printed, _ = await others.communicate()  # closes its standard input, which ends it
        count, ended = (float(each) for each in printed.split())
        self.figures["others_per_s"] = count / (ended - began)
        self.figures["append_confirmed_among_others_p50_ms"] = percentile(took, 0.5) * 1000

    # ---- reading

    async def reads(self, book: Book) -> None:
        topic = f"{self.name}-r"
        journal = book.journal(topic)
        long = 100_000 // self.scale
        # Each append has one event, so that both sides read one row per event.
        for id, count in (("long", long), ("short", 1000)):
            for start in range(0, count, 10_000):
                await journal.append_many([(id, [Event(BYTES)])] * min(10_000, count - start), confirm=False)
        await journal.append("together", [Event(BYTES)] * 1000)
        with timed("replicating"):
            await replicate(book, topic)
        segment_size = (await journal.create()).segment_size
        address, keyspace = str(book.settings.section("store").url).removeprefix("cassandra://").split("/")
        rounds = 100 // self.scale
        async with driver_session(address, keyspace) as session:
            read_rows = await _row_reader(session, topic, segment_size)
            for ratio, id, count, times in (
                ("read_1k_vs_driver", "short", 1000, 4 * rounds), ("read_100k_vs_driver", "long", long, 15),
            ):  # fmt: skip
                sides = {
                    "tidebook": Side(partial(_count, journal, id)),
                    "driver": Side(partial(read_rows, id, count)),
                }
                with timed(f"reading {count} events"):
                    measures = await take_turns(sides, times, warm_rounds=max(2, times // 5))
                self._keep(f"read_{id}", measures, count)
                ours, theirs = ([each.wall_s for each in each_rounds] for each_rounds in measures.values())
                self._compare(ratio, ours, theirs)
                self.figures[f"read_{id}_ms"] = percentile(ours, 0.5) * 1000
        took = [await _took(lambda: _count(journal, "together")) for _ in range(rounds)]
        self.figures["read_1k_of_one_append_ms"] = percentile(took, 0.5) * 1000

    async def tail(self, book: Book) -> None:
        """Measure a read of a key's 1,000 unreplicated events among 100,000 of other keys, through the head cache."""
        journal = book.journal(f"{self.name}-t")
        others = 100_000 // self.scale
        for start in range(0, others, 10_000):
            some = range(start, min(others, start + 10_000))
            await journal.append_many([(f"o-{n % 500}", [Event(BYTES)]) for n in some], confirm=False)
            await journal.append_many([("mine", [Event(BYTES)])] * (1000 * len(some) // others), confirm=False)
        with timed("first read of the tail"):
            await _count(journal, "mine")
        took = [await _took(lambda: _count(journal, "mine")) for _ in range(50 // min(self.scale, 5))]
        self.figures["read_1k_tail_ms"] = percentile(took, 0.5) * 1000
        if "read_short_ms" in self.figures:
            caught_up = self.figures["read_short_ms"]
            self.ratios["read_1k_in_100k_tail_vs_caught_up"] = self.figures["read_1k_tail_ms"] / caught_up

    def cold_start(self) -> None:
        """Measure a new reader process up to its first event, in parts."""
        script = (
            "import asyncio, sys, time; t0 = time.perf_counter()\n"
            "import tidebook; t1 = time.perf_counter()\n"
            "async def main():\n"
            "    async with tidebook.open(sys.argv[1]) as book:\n"
            "        t2 = time.perf_counter()\n"
            "        async for _ in book.journal(sys.argv[2]).read('short'):\n"
            "            t3 = time.perf_counter(); print(t1 - t0, t2 - t1, t3 - t2); return\n"
            "asyncio.run(main())\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, self.where, f"{self.name}-r"], capture_output=True, text=True, check=True
        )
        parts = [float(each) for each in done.stdout.split()]
        for name, value in zip(("import", "open", "first_event"), parts, strict=True):
            self.figures[f"cold_{name}_s"] = value


async def _row_reader(session: Any, topic: str, segment_size: int) -> Callable[[str, int], Awaitable[None]]:
    """Return a function that reads the rows of a journal by the bare driver, with Tidebook's page size."""
    prepared = await session.create_prepared("SELECT event FROM journal WHERE id = ? AND topic = ? AND segment = ?")

    async def read(id: str, count: int) -> None:
        found = 0
        for segment in range((count - 1) // segment_size + 1):
            rows = await session.execute(prepared.bind([id, topic, segment], page_size=PAGE))
            found += len([row.as_tuple() for row in rows])
        assert found == count

    return read


async def write_concurrently(send: Callable[[str], Awaitable[None]]) -> None:
    """Run 256 tasks that each send one record after another."""

    async def writer(id: str) -> None:
        for _ in range(APPENDS_PER_WRITER):
            await send(id)

    await asyncio.gather(*(writer(f"j-{n}") for n in range(WRITERS)))


@asynccontextmanager
async def other_processes(
    script: str, *arguments: str, count: int = 1
) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Run a script in other processes until the block ends."""
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        for _ in range(count)
    ]
    try:
        yield processes
    finally:
        for each in processes:
            if each.returncode is None:
                each.kill()
            await each.wait()


async def _count(journal: Journal, id: str) -> int:
    count = 0
    async for _ in journal.read(id):  # keep only one page in memory, as the driver does
        count += 1
    return count


async def _took(act: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await act()
    return time.perf_counter() - began
