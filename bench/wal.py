"""Write-ahead log regions on Kafka, compared with its producer performance tool and a bare consumer loop.

It uses the Kafka at `--address host:port`, or one started by ./dev servers; without either, it starts one for the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import tracemalloc
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from confluent_kafka import Consumer, TopicPartition

from bench.servers import running, status_file
from bench.timing import report, timed
from tidebook.log.port import Log, Outgoing
from tidebook.runtime.clock import RandomIds, SystemClock
from tidebook.runtime.metrics import Metrics
from tidebook.wal.meta import RegionMeta, fold
from tidebook.wal.record import OwnerClaim, TableWrites, Write
from tidebook.wal.region import Region
from tidebook.wal.settings import WalSettings
from tidebook.wal.wal import Wal
from tidebook.wiring.adapters import open_log
from tidebook.wiring.settings import Section, Settings

PAYLOAD = b"x" * 1024
SMALL = b"x" * 200
TABLES, WRITERS = 16, 64
LIMIT_BYTES = 1_000_000
ROUNDS = 3
TARGETS = {
    "write_10_vs_perf_tool": 0.8,
    "write_1_vs_perf_tool": 0.4,
    "write_1_vs_one_at_a_time": 3.0,
    "recovery_2m_vs_100k": 1.5,
    "meta_bytes_per_1000": 200,
    "replay_vs_bare_consumer": 0.5,
}
PERF_TOOL = "org.apache.kafka.tools.ProducerPerformance"
#: The tuned settings of the tool, whose default batch is 16 KiB.
PERF_PROPERTIES = ["acks=all", "batch.size=262144", "linger.ms=5", "buffer.memory=134217728", "compression.type=none"]


def main(argv: list[str]) -> None:
    """Run all parts, or some, and print the ratios."""
    parser = argparse.ArgumentParser(prog="bench wal", description=__doc__)
    parser.add_argument("--address", help="host:port of a running Kafka")
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    parser.add_argument("--only", choices=["write", "recovery", "memory", "replay"], help="run only this part")
    options = parser.parse_args(argv)
    ratios: dict[str, float] = {}
    figures: dict[str, Any] = {}
    with _kafka(options.address) as address:
        bench = Bench(address, 10 if options.quick else 1, ratios, figures)
        for name in [options.only] if options.only else ["write", "recovery", "memory", "replay"]:
            asyncio.run(getattr(bench, name)())
    report("wal", ratios, figures, {name: TARGETS[name] for name in ratios if name in TARGETS})


class Bench:
    """One run, in a separate namespace."""

    def __init__(self, address: str, scale: int, ratios: dict[str, float], figures: dict[str, Any]) -> None:
        self.address = address
        self.scale = scale
        self.ratios = ratios
        self.figures = figures

    # Writing

    async def write(self) -> None:
        """Measure payloads per second: the tool, 64 writers to 16 tables with 10 or 1 per write, and one writer."""
        count = 400_000 // self.scale
        rates: dict[str, list[float]] = {"tool": [], "write_10": [], "write_1": [], "one_at_a_time": []}
        async with Opened(self.address) as opened:
            topic = await opened.topic()
            for number in range(ROUNDS):
                print(f"round {number + 1} of {ROUNDS}", file=sys.stderr)
                rates["tool"].append(await asyncio.to_thread(self._perf_tool, topic, count))
                region = await opened.region()
                rates["write_10"].append(await _write(region, count, 10))
                rates["write_1"].append(await _write(region, count // 2, 1))
                rates["one_at_a_time"].append(await _write(region, 3_000 // self.scale, 1, writers=1))
        middle = {name: median(each) for name, each in rates.items()}
        self.figures |= {f"{name}_per_s": round(value) for name, value in middle.items()}
        self.figures["rounds_per_s"] = {name: [round(value) for value in each] for name, each in rates.items()}
        self.ratios |= {
            "write_10_vs_perf_tool": middle["write_10"] / middle["tool"],
            "write_1_vs_perf_tool": middle["write_1"] / middle["tool"],
            "write_1_vs_one_at_a_time": middle["write_1"] / middle["one_at_a_time"],
        }

    def _perf_tool(self, topic: str, count: int) -> float:
        command = ["java", "-Xmx512m", "-cp", _tool_jars(), PERF_TOOL, "--topic", topic]
        command += ["--num-records", str(count), "--record-size", str(len(PAYLOAD)), "--throughput", "-1"]
        command += ["--command-property", f"bootstrap.servers={self.address}", *PERF_PROPERTIES]
        with timed(f"{count:,} records by Kafka's producer performance tool"):
            reported = subprocess.run(command, capture_output=True, text=True, check=False)
        if reported.returncode != 0:
            sys.exit(f"the producer performance tool failed: {reported.stdout[-1000:]}{reported.stderr[-1000:]}")
        last = [line for line in reported.stdout.splitlines() if "records/sec" in line][-1]
        return float(last.split(" records/sec")[0].split(",")[-1])

    # Recovery

    async def recovery(self) -> None:
        """Measure an open with 10,000 unpacked records after the snapshot, by the number of records before it."""
        async with Opened(self.address, pack_bytes=1) as opened:
            regions = {}
            for before in (100_000 // self.scale, 2_000_000 // self.scale):
                region = await opened.region()
                with timed(f"{before:,} records, a snapshot, and 10,000 more"):
                    await _write(region, before, 100, payload=b"x" * 20, quiet=True)
                    await region.snapshot()
                    await _write(region, 10_000, 1, payload=b"x" * 20, quiet=True)
                regions[before] = region.id
                await region.close()
            times: dict[int, list[float]] = {before: [] for before in regions}
            for _ in range(15):
                for before, id in regions.items():
                    async with Opened(self.address, namespace=opened.namespace) as again:
                        held = await again.wal.open_region(id, writable=False)
                        times[before].append(held.recovery_s)
        # The minimum of each is reported, because other load can only add time.
        few, many = (min(each) for each in times.values())
        self.figures |= {"recovery_100k_s": round(few, 4), "recovery_2m_s": round(many, 4)}
        self.ratios["recovery_2m_vs_100k"] = many / few

    # Memory

    async def memory(self) -> None:
        """Measure the memory of a region's meta, as counted by Python, per 1,000 records in batches of 100."""
        batches = 10_000
        writer = b"w" * 16
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        meta = RegionMeta()
        fold(meta, 0, 0, OwnerClaim(1, writer))
        numbers = [1] * TABLES
        for batch in range(batches):
            table = batch % TABLES
            fold(meta, batch + 1, 102_400, Write(1, writer, (TableWrites(table, numbers[table], bytes(400)),)))
            numbers[table] += 100
        held = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        self.ratios["meta_bytes_per_1000"] = held / (batches * 100 / 1000)

    # Replay

    async def replay(self) -> None:
        """Measure entries per second through handlers, and a bare consumer loop over as many plain records."""
        count = 1_000_000 // self.scale
        async with Opened(self.address) as opened:
            region = await opened.region()
            topic = await opened.topic()
            with timed(f"{count:,} entries, and as many plain records"):
                await _write(region, count, 10, payload=SMALL, quiet=True)
                await _fill(opened.log, topic, count)
            data = f"wal.{opened.namespace}.{region.id}.data"
            rates: dict[str, list[float]] = {"bare": [], "bare_same_topic": [], "replay": []}
            for _ in range(ROUNDS):
                with timed("bare consumer loop") as watch:
                    consumed = await asyncio.to_thread(self._consume, topic, await opened.log.end(topic, 0))
                rates["bare"].append(watch.rate(consumed))
                with timed("bare consumer loop over the region's own topic") as watch:
                    await asyncio.to_thread(self._consume, data, await opened.log.end(data, 0))
                rates["bare_same_topic"].append(watch.rate(count))
                with timed("replay") as watch:
                    counts = await region.replay(dict.fromkeys(range(TABLES), _ignore))
                assert sum(counts.values()) == count, counts
                rates["replay"].append(watch.rate(count))
        middle = {name: median(each) for name, each in rates.items()}
        self.figures |= {f"{name}_per_s": round(value) for name, value in middle.items()}
        self.ratios["replay_vs_bare_consumer"] = middle["replay"] / middle["bare"]
        self.ratios["replay_vs_bare_consumer_of_the_same_topic"] = middle["replay"] / middle["bare_same_topic"]

    def _consume(self, topic: str, end: int) -> int:
        consumer = Consumer({"bootstrap.servers": self.address, "group.id": "bench", "enable.auto.commit": False})
        consumer.assign([TopicPartition(topic, 0, 0)])
        count = size = 0
        at = -1
        while at < end - 1:
            for message in consumer.consume(1000, 0.05):
                size += len(message.value() or b"")
                at = message.offset() or 0
                count += 1
        consumer.close()
        return count


class Opened:
    """A log, and a namespace on it that is removed at the end if this object has chosen its name."""

    def __init__(self, address: str, *, namespace: str | None = None, **settings: int) -> None:
        self._wal_settings = WalSettings(limit_bytes=LIMIT_BYTES, clean_every_s=0, **settings)
        self._settings = Settings(Path(), {"log": Section(f"kafka://{address}")})
        self._mine = namespace is None
        self.namespace = namespace or f"bench-{uuid.uuid4().hex[:12]}"
        self._topics: list[str] = []
        self._regions = 0

    async def __aenter__(self) -> Opened:
        metrics = Metrics()
        self.log: Log = await open_log(self._settings, clock=SystemClock(), metrics=metrics)
        self.wal = Wal(
            self.log,
            self.namespace,
            clock=SystemClock(),
            ids=RandomIds(),
            metrics=metrics,
            settings=self._wal_settings,
        )
        return self

    async def region(self) -> Region:
        self._regions += 1
        return await self.wal.open_region(self._regions, create=True)

    async def topic(self) -> str:
        """Create a plain topic with a region's settings."""
        name = f"{self.namespace}-plain-{len(self._topics)}"
        await self.log.create_topic(name, 1, limit_bytes=LIMIT_BYTES, keep_forever=True)
        self._topics.append(name)
        return name

    async def __aexit__(self, *_: object) -> None:
        if self._mine:
            for region in await self.wal.regions():
                await self.wal.delete_region(region)
            for topic in self._topics:
                await self.log.delete_topic(topic)
        await self.wal.close()
        await self.log.close()


async def _write(
    region: Region, count: int, each: int, *, writers: int = WRITERS, payload: bytes = PAYLOAD, quiet: bool = False
) -> float:
    """Write `count` payloads, `each` per write; return the payloads per second."""
    payloads = [payload] * each
    left = count // each

    async def one(writer: int) -> None:
        nonlocal left
        table = writer % TABLES
        while left > 0:
            left -= 1
            await region.write(table, payloads)

    began = time.perf_counter()
    await asyncio.gather(*map(one, range(writers)))
    seconds = time.perf_counter() - began
    if not quiet:
        print(f"  {writers} writers, {each} per write: {count / seconds:,.0f} payloads/s", file=sys.stderr)
    return count / seconds


async def _fill(log: Log, topic: str, count: int) -> None:
    loop = asyncio.get_running_loop()
    for begin in range(0, count, 10_000):
        done = loop.create_future()
        left = size = min(10_000, count - begin)

        def sent(_: object, done: asyncio.Future[None] = done) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                done.set_result(None)

        for _ in range(size):
            log.send(Outgoing(topic, 0, None, SMALL), sent)
        await done


def _ignore(entry: object) -> None:
    pass


def _tool_jars() -> str:
    # In a separate process, because this module imports those of all test servers.
    script = "import os; from tidebook.testing.servers.artifacts import kafka_tools_jars as jars; "
    script += "print(os.pathsep.join(map(str, jars())))"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


@contextmanager
def _kafka(address: str | None) -> Iterator[str]:
    if address is None and status_file().exists() and "kafka" in running():
        address = str(running()["kafka"]["address"])
    if address is not None:
        yield address
        return
    servers = [sys.executable, "-m", "tidebook.testing.servers"]
    with tempfile.TemporaryDirectory(prefix="bench-wal-") as home:
        which = ["--only", "kafka", "--home", home, "--profile", "bench"]
        try:
            subprocess.run([*servers, "start", *which], check=True, stdout=sys.stderr)
            yield str(json.loads((Path(home) / "status.json").read_text())["servers"]["kafka"]["address"])
        finally:
            subprocess.run([*servers, "stop", *which], check=True, stdout=sys.stderr)
