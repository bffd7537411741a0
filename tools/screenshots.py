"""`python -m tools.screenshots`: take the pictures of the console that README and the documentation show.

`tidebook up --demo` runs for a few minutes to fill its charts; then typical problems are added: dead letters, parked
messages and records. With `--all FOLDER`, every page is taken in two themes and two sizes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from playwright.sync_api import Browser, sync_playwright
from sqlalchemy import create_engine

import tidebook
from tidebook import Book, Event
from tidebook.core.key import partition_of
from tidebook.log.port import Outgoing
from tidebook.queue.entry import Entry
from tidebook.queue.port import QueueSettings
from tidebook.server.console.catalog import CATALOG
from tidebook.server.console.render import link
from tools import chromium
from tools.environment import PYTHON, ROOT, variables

IMAGES = ROOT / "docs" / "images"
DESKTOP, PHONE = (1280, 860), (390, 780)
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
JOURNAL = {"topic": "orders", "id": "o-1042"}
#: Pages of a running job or act.
WITHOUT_ADDRESS = {"job", "queue_act"}
#: Dead letters, parked messages, and a parked record.
FINDINGS = 3
LETTERS = {"queue": "invoices", "status": "dead"}


class Picture(NamedTuple):
    """A picture of the documentation."""

    name: str
    path: str
    theme: str = "light"


PICTURES = (
    Picture("overview", "/?hours=0.25"),
    Picture("journal", link("/journal", **JOURNAL)),
    Picture("event-dark", link("/event", number=2, **JOURNAL), "dark"),
    Picture("confirm", link("/acts/queues.drop", **LETTERS)),
    Picture("queue", link("/queue", **LETTERS)),
)


def main(argv: list[str]) -> None:
    """Run the demo, add to it, and take the pictures."""
    parser = argparse.ArgumentParser(prog="tools.screenshots", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long the demo runs")
    parser.add_argument("--all", metavar="FOLDER", type=Path, help="also take every page in two themes and two sizes")
    options = parser.parse_args(argv)
    chromium.ensure()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "shop"
        with _demo(folder) as url:
            asyncio.run(_sell(folder, options.minutes * 60))
            with _browser() as browser:
                _take(browser, url, Picture("demo", "/?hours=0.25"), IMAGES / "console-demo.png")
            # This is outside the blocks with a browser, because Playwright runs an event loop in this thread.
            letter = asyncio.run(_add_problems(folder))
            _await_findings(url)
            with _browser() as browser:
                for each in PICTURES:
                    _take(browser, url, each, IMAGES / f"console-{each.name}.png")
                if options.all is not None:
                    _take_all(browser, url, letter, options.all)


def _await_findings(url: str) -> None:
    """Wait for a survey that has found all added problems."""
    for _ in range(600):
        if len(httpx.get(f"{url}/overview.json", timeout=60).json()["findings"]) >= FINDINGS:
            return
        time.sleep(0.1)
    raise AssertionError("the overview does not show what was added")


@contextmanager
def _browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium.ensure(), args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def _demo(folder: Path) -> Iterator[str]:
    """Run the demo; yield its address."""
    command = [str(PYTHON), "-m", "tidebook.cli", "up", "--demo", "--json", "--port", "0", "--book", str(folder)]
    output = folder.parent / "up.jsonl"
    with output.open("w") as file:
        process = subprocess.Popen(command, cwd=folder.parent, env=variables(), stdout=file)
    try:
        while not (urls := [json.loads(line)["url"] for line in output.read_text().splitlines() if '"url"' in line]):
            assert process.poll() is None, "the demo has ended"
            time.sleep(0.1)
        yield urls[0]
    finally:
        process.terminate()
        process.wait(60)


async def _sell(folder: Path, seconds: float) -> None:
    """Append orders to journals for this long."""
    dice, ends_s = random.Random(1042), time.monotonic() + seconds
    async with tidebook.open(folder) as book:
        journal, n = book.journal(JOURNAL["topic"]), 0
        while time.monotonic() < ends_s:
            lines = [{"sku": f"sku-{dice.randrange(100, 999)}", "quantity": dice.randrange(1, 5)}]
            kind = "OrderPlaced" if n == 0 else dice.choice(("LineAdded", "LineAdded", "AddressChanged", "OrderPaid"))
            payload = {"lines": lines, "total": round(dice.uniform(5, 400), 2), "currency": "EUR"}
            tags = {"paid"} if kind == "OrderPaid" else set[str]()
            event = Event(payload, type=kind, tags=tags, metadata={"user": dice.choice(("ada", "grace", "linus"))})
            await journal.append(JOURNAL["id"], [event])
            await journal.append(f"o-{dice.randrange(1000, 1042)}", [event])
            n += 1
            await asyncio.sleep(dice.expovariate(1 / 2.0))


async def _add_problems(folder: Path) -> int:
    """Add problems that need an operator, and return the id of a dead letter."""
    async with tidebook.open(folder) as book:
        queue = book.queue(LETTERS["queue"], settings=QueueSettings(max_timeouts=0))
        data = [{"invoice": 7_000 + n, "to": f"customer-{n}@example.org", "total": 12.5 * n} for n in range(1, 61)]
        await queue.put_many([Entry(data=each, key=f"invoice-{each['invoice']}") for each in data])
        later = int(time.time() + 3_600) * 1000
        await queue.put_many(
            [Entry(data=each, key=f"reminder-{each['invoice']}", process_at=later) for each in data[:9]]
        )
        await queue.fail(await queue.claim(9, 600, together=False), reason="smtp 550: mailbox is full")
        await queue.fail(await queue.claim(4, 600, together=False), reason="TimeoutError: printer-2 does not answer")
        await queue.claim(3, 3_600, together=False)
        _publish_unsendable(book)
        config = await book.journal(JOURNAL["topic"]).topic_config()
        partition = partition_of(JOURNAL["id"], config.partitions)
        value = b'{"from": "another program"}'
        await book.log.append(Outgoing(JOURNAL["topic"], partition, JOURNAL["id"].encode(), value))
        return (await queue.dead_letters())[0].id


def _publish_unsendable(book: Book) -> None:
    """Publish messages that their journal refuses, because its last number is not the expected one."""
    engine = create_engine(book.outbox.url)
    with engine.begin() as connection:
        for n in range(3):
            book.outbox.append(connection, "shipments", f"s-{n}", [Event({"parcel": n})], expected=99)
    engine.dispose()


def _take(browser: Browser, url: str, picture: Picture, file: Path, size: tuple[int, int] = DESKTOP) -> None:
    """Take one picture, of the whole page unless it is a picture of the documentation."""
    viewport: Any = {"width": size[0], "height": size[1]}
    context = browser.new_context(viewport=viewport, color_scheme="dark" if picture.theme == "dark" else "light")
    page = context.new_page()
    page.goto(url + picture.path)
    page.wait_for_selector("html[data-ready]")
    if page.locator("[data-chart]").count():
        page.wait_for_selector(".u-over")
    page.screenshot(path=file, full_page=file.parent != IMAGES)
    context.close()
    print(file, flush=True)


def _take_all(browser: Browser, url: str, letter: int, folder: Path) -> None:
    paths = _addresses(letter)
    missing = CATALOG.pages.keys() - paths.keys() - WITHOUT_ADDRESS
    assert not missing, f"pages without an address: {missing}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in paths.items():
        for theme in ("light", "dark"):
            for kind, size in (("desktop", DESKTOP), ("phone", PHONE)):
                _take(browser, url, Picture(name, path, theme), folder / f"{name}-{kind}-{theme}.png", size)


def _addresses(letter: int) -> dict[str, str]:
    return {
        "overview": "/",
        "journals": "/journals",
        "topic": link("/topic", topic=JOURNAL["topic"]),
        "journal": link("/journal", **JOURNAL),
        "journal_filtered": link("/journal", where='type = "OrderPaid" and payload.total > 100', **JOURNAL),
        "journal_missing": link("/journal", topic=JOURNAL["topic"], id="none"),
        "event": link("/event", number=2, **JOURNAL),
        "event_hex": link("/event", number=2, form="hex", **JOURNAL),
        "tags": "/tags",
        "tag": link("/tag", tag="paid"),
        "queues": "/queues",
        "queue": link("/queue", **LETTERS),
        "queue_due": link("/queue", queue=LETTERS["queue"]),
        "queue_worker": link("/queue", queue="shop-mails"),
        "queue_processing": link("/queue", queue=LETTERS["queue"], status="processing"),
        "entry": link("/entry", place=letter, **LETTERS),
        "outbox": "/outbox",
        "wal": "/wal",
        "region": link("/region", namespace="shop-metrics", region=1),
        "pipeline": "/pipeline",
        "audit": "/audit",
        "tokens": "/tokens",
        "settings": "/settings",
        "doctor": "/doctor",
        "sign_in": "/sign-in",
        "confirm": link("/acts/queues.drop", **LETTERS),
        "problem": "/nowhere",
    }


if __name__ == "__main__":
    main(sys.argv[1:])
