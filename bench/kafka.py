"""Journals on Kafka and Cassandra beside what the servers' own clients do: 200-byte events, one broker, one node.

`./dev bench` starts the servers, unless they run or `--book tidebook.toml` names them.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import tidebook
from bench.replication import replicate
from bench.servers import status_file
from bench.timing import percentile, report, timed
from tidebook.core.event import Event
from tidebook.journal.journal import Journal
from tidebook.wiring.book import Book

BYTES = b"x" * 200
WRITERS = 256
PAGE = 1000
#: Turns of each client that do not count: a broker that was just started compiles its code for several seconds.
WARM_TURNS = 8
#: Other processes end after this time, even if this process was killed.
OTHERS_S_MAX = 60
#: Appends 10,000 a second until its standard input ends; prints when it began, then how many, and when it ended.
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
    "append_many_vs_produce_loop": 0.6,
    "append_unconfirmed_p50_vs_produce": 1.5,
    "append_confirmed_p50_vs_produce": 3.0,
    "read_1k_vs_driver": 1.5,
    "read_100k_vs_driver": 1.3,
    "read_1k_in_100k_tail_vs_caught_up": 3.0,
}


def main(argv: list[str]) -> None:
    """Run all parts and print the ratios."""
    parser = argparse.ArgumentParser(prog="bench kafka", description=__doc__)
    parser.add_argument("--book", help="a tidebook.toml that names Kafka and Cassandra")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    options = parser.parse_args(argv)
    home = status_file().parent
    bench = Bench(options.book or str(home / "tidebook.toml"), 10 if options.quick else 1)
    asyncio.run(bench.run())
    report("kafka", bench.ratios(), {name: round(value, 4) for name, value in bench.figures.items()}, TARGETS)


class Bench:
    """One run over new topics."""

    def __init__(self, where: str, scale: int) -> None:
        self.where = where
        self.scale = scale
        self.name = f"bench-{uuid.uuid4().hex[:8]}"
        self.figures: dict[str, float] = {}

    def ratios(self) -> dict[str, float]:
        f = self.figures
        client = max(f["aioproducer_256_per_s"], f["aiokafka_256_per_s"])
        return {
            "appends_256_vs_best_async_client": f["append_256_per_s"] / client,
            "append_many_vs_produce_loop": f["append_many_per_s"] / f["produce_loop_per_s"],
            "append_unconfirmed_p50_vs_produce": f["append_unconfirmed_p50_ms"] / f["produce_p50_ms"],
            "append_confirmed_p50_vs_produce": f["append_confirmed_p50_ms"] / f["produce_p50_ms"],
            "read_1k_vs_driver": f["read_short_ms"] / f["driver_short_ms"],
            "read_100k_vs_driver": f["read_long_ms"] / f["driver_long_ms"],
            "read_1k_in_100k_tail_vs_caught_up": f["read_1k_tail_ms"] / f["read_short_ms"],
        }

    async def run(self) -> None:
        async with tidebook.open(self.where) as book:
            servers = str(book.settings.section("log").url).removeprefix("kafka://")
            await self.concurrent(book, servers)
            await self.many(book, servers)
            await self.latency(book, servers)
            await self.reads(book)
            await self.tail(book)
            for name in ("init", "seek", "poll"):
                timing = book.metrics.timing(f"kafka_consumer_{name}")
                if timing.count:
                    self.figures[f"consumer_{name}_mean_ms"] = timing.total_s / timing.count * 1000
                    self.figures[f"consumer_{name}_count"] = timing.count
        self.cold_start()

    # ---- writing

    async def concurrent(self, book: Book, servers: str) -> None:
        """256 writers that await each message; in turns, so that all see the same machine."""
        from aiokafka import AIOKafkaProducer

        topic = f"{self.name}-w"
        journal = book.journal(topic)
        await journal.append("warm", [Event(BYTES)], confirm=False)
        aiokafka = AIOKafkaProducer(bootstrap_servers=servers, acks="all", enable_idempotence=True)
        await aiokafka.start()

        async def ours(id: str) -> None:
            await journal.append(id, [Event(BYTES)], confirm=False)

        async def theirs(id: str) -> None:
            await aiokafka.send_and_wait(topic, BYTES, key=id.encode())

        try:
            await self._in_turn({"append": ours, "aiokafka": theirs}, turns=5)
        finally:
            await aiokafka.stop()
        await self._aioproducer(topic, servers)

    async def _aioproducer(self, topic: str, servers: str) -> None:
        """Measure it alone: while it is open, its threads compete for the interpreter in every turn.

        Reports arrive only in a poll, so a task always polls: otherwise each batch would wait for 0.1 s.
        """
        from confluent_kafka.aio import AIOProducer

        settings = {"bootstrap.servers": servers, "acks": "all", "enable.idempotence": True, "linger.ms": 0}
        aioproducer = AIOProducer(settings, batch_size=WRITERS, buffer_timeout=0.1)

        async def poll() -> None:
            while True:
                await aioproducer.poll(0.005)

        async def theirs(id: str) -> None:
            await (await aioproducer.produce(topic, value=BYTES, key=id.encode()))

        polling = asyncio.create_task(poll())
        try:
            await self._in_turn({"aioproducer": theirs}, turns=5)
        finally:
            polling.cancel()
            await aioproducer.close()

    async def _in_turn(self, sides: Mapping[str, Callable[[str], Awaitable[None]]], *, turns: int) -> None:
        rates = defaultdict[str, list[float]](list)
        for turn in range(WARM_TURNS + turns):
            for name, send in sides.items():
                rate = await self._writers(name, send)
                if turn >= WARM_TURNS:
                    rates[f"{name}_256_per_s"].append(rate)
        self._medians(rates)

    async def _writers(self, name: str, send: Callable[[str], Awaitable[None]]) -> float:
        count = 25_600 // self.scale

        async def writer(id: str) -> None:
            for _ in range(count // WRITERS):
                await send(id)

        with timed(f"{name}, {WRITERS} concurrent") as watch:
            await asyncio.gather(*(writer(f"j-{n}") for n in range(WRITERS)))
        return watch.rate(count)

    async def many(self, book: Book, servers: str) -> None:
        from confluent_kafka import Producer

        count = 100_000 // self.scale
        journal = book.journal(f"{self.name}-m")
        await journal.append("warm", [Event(BYTES)], confirm=False)
        items = [(f"k-{n % 1000}", [Event(BYTES)]) for n in range(count)]
        producer = Producer({"bootstrap.servers": servers, "acks": "all", "enable.idempotence": True})
        producer.produce(f"{self.name}-m", BYTES)
        producer.flush()  # a new producer needs half a second until it may send
        done = 0

        def delivered(error: object, _: object) -> None:
            nonlocal done
            assert error is None
            done += 1

        def bare() -> None:
            for n in range(count):
                while True:
                    try:
                        producer.produce(f"{self.name}-m", BYTES, f"k-{n % 1000}".encode(), on_delivery=delivered)
                        break
                    except BufferError:
                        producer.poll(0.01)
                producer.poll(0)
            producer.flush()

        turns, rates = 7, defaultdict[str, list[float]](list)
        for _ in range(turns):  # in turns, so that both see the same machine
            with timed("tidebook, append_many") as watch:
                await journal.append_many(items, confirm=False)
            rates["append_many_per_s"].append(watch.rate(count))
            with timed("a bare produce loop with delivery callbacks") as watch:
                bare()
            rates["produce_loop_per_s"].append(watch.rate(count))
        assert done == turns * count
        self._medians(rates)

    def _medians(self, rates: Mapping[str, list[float]]) -> None:
        self.figures |= {name: percentile(each, 0.5) for name, each in rates.items()}

    async def latency(self, book: Book, servers: str) -> None:
        from confluent_kafka import Producer

        rounds = 2_000 // self.scale
        journal = book.journal(f"{self.name}-l")
        await journal.append("j", [Event(BYTES)])
        producer = Producer({"bootstrap.servers": servers, "acks": "all", "enable.idempotence": True, "linger.ms": 0})

        await book.log.create_topic(f"{self.name}-b", 1)  # so that no other writer uses the journal's partition

        async def bare() -> None:
            producer.produce(f"{self.name}-b", BYTES, b"other", partition=0)
            producer.flush()

        async def ours(confirm: bool) -> None:
            await journal.append("j", [Event(BYTES)], confirm=confirm)

        await bare()
        confirmed, unconfirmed, alone = list[float](), list[float](), list[float]()
        for _ in range(rounds):  # in turns, so that all of them see the same machine
            confirmed.append(await _took(lambda: ours(True)))
            unconfirmed.append(await _took(lambda: ours(False)))
            alone.append(await _took(bare))
        self.figures["produce_p50_ms"] = percentile(alone, 0.5) * 1000
        self.figures["append_unconfirmed_p50_ms"] = percentile(unconfirmed, 0.5) * 1000
        self.figures["append_confirmed_p50_ms"] = percentile(confirmed, 0.5) * 1000
        await self._latency_among_others(journal, rounds // 4)

    async def _latency_among_others(self, journal: Journal, rounds: int) -> None:
        """The same while another process appends 10,000 a second to the same partitions; printed, with no target."""
        others = await asyncio.create_subprocess_exec(
            sys.executable, "-c", OTHERS, self.where, journal.topic,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert others.stdout is not None
        try:
            began = float(await asyncio.wait_for(others.stdout.readline(), OTHERS_S_MAX))
            took = [await _took(lambda: journal.append("j", [Event(BYTES)])) for _ in range(rounds)]
            printed, _ = await others.communicate()  # its standard input ends, and so does it
        finally:
            if others.returncode is None:
                others.kill()
        count, ended = (float(each) for each in printed.split())
        self.figures["others_per_s"] = count / (ended - began)
        self.figures["append_confirmed_among_others_p50_ms"] = percentile(took, 0.5) * 1000

    # ---- reading

    async def reads(self, book: Book) -> None:
        topic = f"{self.name}-r"
        journal = book.journal(topic)
        long = 100_000 // self.scale
        # One event an append, so that each has a separate row, for the driver as for us.
        for id, count in (("long", long), ("short", 1000)):
            for start in range(0, count, 10_000):
                await journal.append_many([(id, [Event(BYTES)])] * min(10_000, count - start), confirm=False)
        await journal.append("together", [Event(BYTES)] * 1000)
        with timed("replicating"):
            await replicate(book, topic)
        driver = await Driver.open(book, topic, (await journal.create()).segment_size)
        rounds = 100 // self.scale
        try:
            for id, count, times in (("short", 1000, rounds), ("long", long, 5)):
                ours, theirs = list[float](), list[float]()
                for _ in range(times):  # in turns, so that both see the same machine
                    ours.append(await _took(lambda id=id: _count(journal, id)))  # type: ignore[misc]
                    theirs.append(await _took(lambda id=id, count=count: driver.read(id, count)))  # type: ignore[misc]
                self.figures[f"read_{id}_ms"] = percentile(ours, 0.5) * 1000
                self.figures[f"driver_{id}_ms"] = percentile(theirs, 0.5) * 1000
            took = [await _took(lambda: _count(journal, "together")) for _ in range(rounds)]
            self.figures["read_1k_of_one_append_ms"] = percentile(took, 0.5) * 1000
        finally:
            await driver.close()

    async def tail(self, book: Book) -> None:
        """A key's 1,000 unreplicated events among 100,000 of others, through the head cache."""
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

    def cold_start(self) -> None:
        """A reader process, from nothing to its first event, split into its parts."""
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


class Driver:
    """Cassandra's driver, reading the very rows that we read, with the same page size."""

    def __init__(self, cluster: Any, session: Any, prepared: Any, topic: str, segment_size: int) -> None:
        self._cluster = cluster
        self._session = session
        self._prepared = prepared
        self._topic = topic
        self._segment_size = segment_size

    @classmethod
    async def open(cls, book: Book, topic: str, segment_size: int) -> Driver:
        import acsylla

        address, keyspace = str(book.settings.section("store").url).removeprefix("cassandra://").split("/")
        host, port = address.split(":")
        cluster = acsylla.create_cluster([host], port=int(port), consistency="LOCAL_QUORUM", log_level="disabled")
        session = await cluster.create_session()
        select = f"SELECT event FROM {keyspace}.journal WHERE id = ? AND topic = ? AND segment = ?"
        return cls(cluster, session, await session.create_prepared(select), topic, segment_size)

    async def read(self, id: str, count: int) -> None:
        found = 0
        for segment in range((count - 1) // self._segment_size + 1):
            rows = await self._session.execute(self._prepared.bind([id, self._topic, segment], page_size=PAGE))
            found += len([row.as_tuple() for row in rows])
        assert found == count

    async def close(self) -> None:
        await self._session.close()
        self._cluster.destroy()


async def _count(journal: Journal, id: str) -> int:
    count = 0
    async for _ in journal.read(id):  # like the driver's side, it keeps no more than a page
        count += 1
    return count


async def _took(act: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await act()
    return time.perf_counter() - began
