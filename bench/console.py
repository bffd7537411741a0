"""The console on a large embedded book: a journal and a queue of a million entries, and ten thousand topics.

`tidebook serve` runs in a separate process; the time of a page is that of its response on a persistent connection.
Chromium then opens some pages, and reports when their script is ready.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

import httpx
from playwright.sync_api import sync_playwright

from bench import servers
from bench.timing import percentile, report, timed
from tidebook import Event
from tidebook.queue.entry import Entry
from tidebook.replication.inline import replicate_to_end
from tidebook.server.console.catalog import CATALOG
from tidebook.wiring.book import Book
from tidebook.wiring.book import open as open_book

TARGETS = {"page_p50_ms_max": 50.0, "interactive_ms_max": 500.0}


class Sizes(NamedTuple):
    """The size of the book."""

    events: int
    entries: int
    topics: int


FULL, QUICK = Sizes(1_000_000, 1_000_000, 10_000), Sizes(100_000, 100_000, 1_000)
#: The size on servers. Times there have no targets, because they depend more on the servers than on the size.
ON_SERVERS = Sizes(20_000, 20_000, 50)
BATCH = 1_000
TOPICS_AT_ONCE = 100
ROUNDS = 21
CHROMIUM = shutil.which("chromium") or "chromium"
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
JOURNAL = {"topic": "big", "id": "long"}
TAG, NAMESPACE, REGION = "hundredth", "metrics", 1
#: Pages of a running job or act.
NOT_MEASURED = {"job", "queue_act"}


def main(argv: list[str]) -> None:
    """Prepare the book, serve it, and measure its pages."""
    parser = argparse.ArgumentParser(prog="bench console", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the entries")
    parser.add_argument("--book", metavar="FOLDER", help="the folder in which the book is kept for the next run")
    parser.add_argument("--servers", action="store_true", help="on Kafka, Cassandra and PostgreSQL, without targets")
    options = parser.parse_args(argv)
    sizes = ON_SERVERS if options.servers else QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(options.book or temporary) / "book"
        where = stack.enter_context(_settings(Path(temporary))) if options.servers else folder
        if options.servers or not (folder / "prepared").exists():
            asyncio.run(_prepare(where, sizes))
        if not options.servers:
            (folder / "prepared").touch()
        with _served(where) as url:
            figures = _measure_pages(url, sizes)
            figures |= _measure_browser(url)
    pages = [value for name, value in figures.items() if name.endswith("_p50_ms")]
    ready = [value for name, value in figures.items() if name.endswith("_interactive_ms")]
    ratios = {"page_p50_ms_max": max(pages), "interactive_ms_max": max(ready)}
    targets = {} if options.servers else TARGETS
    report("console", ratios, {name: round(value, 1) for name, value in figures.items()}, targets)


@contextmanager
def _settings(folder: Path) -> Iterator[Path]:
    """Write the settings of a book on the running servers, with names that only this run uses."""
    at, name = servers.running(), f"bench_console_{uuid.uuid4().hex[:8]}"
    with servers.database(at["postgres"]["url"], "console") as database:
        path = folder / "tidebook.toml"
        path.write_text(
            f'folder = "{folder}/book"\n'
            f'[log]\nurl = "kafka://{at["kafka"]["address"]}"\n'
            f'[store]\nurl = "cassandra://{at["cassandra"]["address"]}/{name}"\n'
            f'[sql]\nurl = "{database}"\n'
        )
        yield path


async def _prepare(where: Path, sizes: Sizes) -> None:
    embedded = where.suffix != ".toml"
    async with open_book(where, create=True, replicate=embedded) as book:
        with timed(f"a journal of {sizes.events:,} events"):
            journal = book.journal(JOURNAL["topic"])
            for start in range(0, sizes.events, BATCH):
                events = [
                    Event({"n": n, "total": n % 997, "currency": "EUR"}, tags={TAG} if n % 100 == 0 else ())
                    for n in range(start, start + BATCH)
                ]
                await journal.append(JOURNAL["id"], events)
        with timed(f"a queue of {sizes.entries:,} entries"):
            queue = book.queue("big")
            for start in range(0, sizes.entries, BATCH):
                entries = [Entry(data={"n": n}, key=f"k-{n}", priority=n % 5) for n in range(start, start + BATCH)]
                await queue.put_many(entries)
        region = await book.wal(NAMESPACE).open_region(REGION, create=True)
        await region.write(1, [b"entry"] * 100)
    async with open_book(where) as book:
        with timed(f"{sizes.topics:,} topics"):
            for start in range(0, sizes.topics, TOPICS_AT_ONCE):  # concurrent ones share a commit
                numbers = range(start, min(sizes.topics, start + TOPICS_AT_ONCE))
                await asyncio.gather(*(_new_topic(book, n) for n in numbers))
        with timed("replicating"):
            await replicate_to_end(book.log, book.store, tick=True)


async def _new_topic(book: Book, n: int) -> None:
    await book.journal(f"topic-{n:05}").append("a", [Event({"n": n})])


@contextmanager
def _served(where: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "tidebook.cli", "serve", "--json", "--port", "0", "--book", str(where)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait(30)


def _pages(http: httpx.Client, sizes: Sizes) -> dict[str, str]:
    """Return the addresses to measure: every page of the console, some of them in several ways."""
    journal, place = urlencode(JOURNAL), http.get("/queue.json?queue=big").json()["rows"][0]["place"]
    found = {
        "overview": "/",
        "journals": "/journals",
        "journals_by_lag": "/journals?sort=lag",
        "topic": "/topic?topic=topic-00042",
        "journal": f"/journal?{journal}",
        "journal_middle": f"/journal?{journal}&at={sizes.events // 2}",
        "journal_by_offset": f"/journal?{journal}&offset={sizes.events // BATCH // 2}",
        "event": f"/event?{journal}&number={sizes.events // 2}",
        "queues": "/queues",
        "queue": "/queue?queue=big",
        "queue_by_priority": "/queue?queue=big&priority=4",
        "queue_by_key": f"/queue?queue=big&key=k-{sizes.entries // 2}",
        "entry": f"/entry?queue=big&status=due&place={place}",
        "tags": "/tags",
        "tag": f"/tag?tag={TAG}",
        "outbox": "/outbox",
        "wal": "/wal",
        "region": f"/region?namespace={NAMESPACE}&region={REGION}",
        "pipeline": "/pipeline",
        "audit": "/audit",
        "tokens": "/tokens",
        "settings": "/settings",
        "doctor": "/doctor",
        "sign_in": "/sign-in",
    }
    missing = CATALOG.pages.keys() - found.keys() - NOT_MEASURED
    assert not missing, f"pages without an address to measure: {missing}"
    return found


def _measure_pages(url: str, sizes: Sizes) -> dict[str, float]:
    figures: dict[str, float] = {}
    with httpx.Client(base_url=url, timeout=120) as http:
        with timed("the first survey"):
            while http.get("/overview.json").json()["numbers"]["topics"] == 0:
                time.sleep(0.1)
        for name, path in _pages(http, sizes).items():
            times = []
            for _ in range(ROUNDS):
                began = time.perf_counter()
                http.get(path).raise_for_status()
                times.append((time.perf_counter() - began) * 1000)
            figures[f"{name}_p50_ms"] = percentile(times, 0.5)
            figures[f"{name}_p99_ms"] = percentile(times, 0.99)
            print(
                f"  {name}: {figures[f'{name}_p50_ms']:.1f} ms, p99 {figures[f'{name}_p99_ms']:.1f} ms", file=sys.stderr
            )
        with timed("a filter over one step"):
            began = time.perf_counter()
            found = http.get("/journal.json", params={**JOURNAL, "where": "payload.n = -1"}).json()
            figures["filter_events_per_s"] = found["scan"]["scanned"] / (time.perf_counter() - began)
    return figures


def _measure_browser(url: str) -> dict[str, float]:
    """Return when the script of each page was ready, in milliseconds since the navigation began."""
    figures: dict[str, float] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for name, path in (
            ("overview", "/"),
            ("journal", f"/journal?{urlencode(JOURNAL)}"),
            ("queue", "/queue?queue=big"),
        ):
            times = []
            for _ in range(7):
                page = browser.new_page()
                page.goto(url + path)
                page.wait_for_selector("html[data-ready]")
                times.append(page.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"))
                page.close()
            figures[f"{name}_interactive_ms"] = percentile(times, 0.5)
            print(f"  {name} is interactive after {figures[f'{name}_interactive_ms']:.0f} ms", file=sys.stderr)
        browser.close()
    return figures
