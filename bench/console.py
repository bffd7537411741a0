"""The console on a large embedded book: a journal and a queue of a million entries, and ten thousand topics.

`tidebook serve` runs in a process of its own; a page's time is that of its answer on a kept connection. Chromium then
opens the pages, and reports when their script is ready. `./dev bench console --quick`, `--book FOLDER` keeps the book.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import httpx
import msgspec
from playwright.sync_api import sync_playwright

from bench.timing import percentile, report, timed
from tidebook import Event
from tidebook.journal.settings import JournalSettings
from tidebook.queue.entry import Entry
from tidebook.wiring.book import Book
from tidebook.wiring.book import open as open_book

TARGETS = {"page_p50_ms_max": 50.0, "interactive_ms_max": 500.0}
EVENTS, ENTRIES, TOPICS = 1_000_000, 1_000_000, 10_000
BATCH = 1_000
TOPICS_AT_ONCE = 100
ROUNDS = 21
CHROMIUM = shutil.which("chromium") or "chromium"
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
JOURNAL = {"topic": "big", "id": "long"}


def main(argv: list[str]) -> None:
    """Prepare the book, serve it, and measure its pages."""
    parser = argparse.ArgumentParser(prog="bench console", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the entries")
    parser.add_argument("--book", metavar="FOLDER", help="where the book is kept for the next run")
    options = parser.parse_args(argv)
    scale = 10 if options.quick else 1
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.book or temporary) / "book"
        if not (folder / "prepared").exists():
            asyncio.run(_prepare(folder, scale))
            (folder / "prepared").touch()
        with _served(folder) as url:
            figures = _measure_pages(url, EVENTS // scale)
            figures |= _measure_browser(url)
    pages = [value for name, value in figures.items() if name.endswith("_p50_ms")]
    ready = [value for name, value in figures.items() if name.endswith("_interactive_ms")]
    ratios = {"page_p50_ms_max": max(pages), "interactive_ms_max": max(ready)}
    report("console", ratios, {name: round(value, 1) for name, value in figures.items()}, TARGETS)


async def _prepare(folder: Path, scale: int) -> None:
    async with open_book(folder, create=True, replicate=True) as book:
        with timed(f"a journal of {EVENTS // scale:,} events"):
            journal = book.journal(JOURNAL["topic"])
            for start in range(0, EVENTS // scale, BATCH):
                events = [Event({"n": n, "total": n % 997, "currency": "EUR"}) for n in range(start, start + BATCH)]
                await journal.append(JOURNAL["id"], events)
        with timed(f"a queue of {ENTRIES // scale:,} entries"):
            queue = book.queue("big")
            for start in range(0, ENTRIES // scale, BATCH):
                entries = [Entry(data={"n": n}, key=f"k-{n}", priority=n % 5) for n in range(start, start + BATCH)]
                await queue.put_many(entries)
    async with open_book(folder) as book:
        with timed(f"{TOPICS // scale:,} topics"):
            for start in range(0, TOPICS // scale, TOPICS_AT_ONCE):  # concurrent ones share a commit
                await asyncio.gather(*(_new_topic(book, n) for n in range(start, start + TOPICS_AT_ONCE)))
        with timed("replicating"):
            await book.settle(timeout_s=1_200)


async def _new_topic(book: Book, n: int) -> None:
    """Create a topic with one event. It is admitted at once: a first append would read the times of all topics."""
    topic, settings = f"topic-{n:05}", JournalSettings()
    if await book.log.topic(topic) is None:
        state = await book.log.create_topic(topic, settings.partitions, limit_bytes=settings.limit_bytes)
        config = msgspec.structs.replace(settings.topic_config(state.topic_id, state.partitions), admitted=True)
        await book.store.set_topic_config(topic, config, expected=None)
    await book.journal(topic).append("a", [Event({"n": n})])


@contextmanager
def _served(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "tidebook.cli", "serve", "--json", "--port", "0", "--book", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait(30)


def _pages(events: int) -> dict[str, str]:
    journal = urlencode(JOURNAL)
    return {
        "overview": "/",
        "journals": "/journals",
        "journals_by_lag": "/journals?sort=lag",
        "topic": "/topic?topic=topic-00042",
        "journal": f"/journal?{journal}",
        "journal_middle": f"/journal?{journal}&at={events // 2}",
        "journal_by_offset": f"/journal?{journal}&offset={events // BATCH // 2}",
        "event": f"/event?{journal}&number={events // 2}",
        "queues": "/queues",
        "queue": "/queue?queue=big",
        "queue_by_priority": "/queue?queue=big&priority=4",
        "queue_by_key": f"/queue?queue=big&key=k-{events // 2}",
        "tags": "/tags",
        "outbox": "/outbox",
        "wal": "/wal",
        "pipeline": "/pipeline",
        "doctor": "/doctor",
    }


def _measure_pages(url: str, events: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    with httpx.Client(base_url=url, timeout=120) as http:
        with timed("the first survey"):
            while http.get("/overview.json").json()["numbers"]["topics"] == 0:
                time.sleep(0.1)
        for name, path in _pages(events).items():
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
