"""In a real browser, in two themes and on a phone, axe finds no problem on any page, and hostile strings do no harm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import DESKTOP, PHONE, Watched
from tests.browser.served_console import ServedConsole, served_console
from tests.browser.test_acts import confirm
from tests.integration.server.console_book import PAGES, QUEUE, fill, filled
from tidebook import Book, Event
from tidebook.core.key import partition_of
from tidebook.log.port import Outgoing
from tidebook.outbox.message import message
from tidebook.queue.entry import Entry
from tidebook.queue.port import QueueSettings
from tidebook.server.console.catalog import CATALOG
from tidebook.server.console.render import link

HOSTILE = {
    "script": "<script>alert(1)</script>",
    "markup": "\"'><img src=x onerror=alert(1)><b hx-get='/x' hx-trigger='load'>{{7*7}}</b>",
    "path": "../..//..\\%2e%2e/a?b=c#d&e=f.json",
    "rtl": "\u202egnp.exe\u202c \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "emoji": "👩‍👩‍👧‍👦🏴‍☠️" * 3 + "e\u0301" * 20,
    "long": "x" * 180,
}
LARGE_BYTES = 10_000_000
#: Each run stores here a screenshot of every page in every look.
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
#: Pages that do not list the keys: they have no menu, or their focus is in a text field.
WITHOUT_KEYS = {"sign_in", "problem", "problem_form", "confirm"}


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedConsole]:
    folder = tmp_path_factory.mktemp("looks")
    (folder / "tidebook.toml").write_text('folder = "book"\n[journal]\nlimit_bytes = 40000000\n')
    with served_console(folder / "tidebook.toml") as served:
        yield served


def problems_of(page: Page) -> list[str]:
    """Return the violations that axe finds, and whether the page is wider than the window."""
    found = Axe().run(page).response["violations"]
    problems = [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in found]
    if page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
        problems.append("the page is wider than the window")
    return problems


@pytest.fixture(scope="module")
def addresses(console: ServedConsole, browser: Browser) -> dict[str, str]:
    """Fill the book, start a job and an act on many entries; return the address of each page, some in several forms."""
    known = console.call(fill)
    found = {name: link(page.path, **filled(PAGES[name], known)) for name, page in CATALOG.pages.items()}
    context = browser.new_context()
    page = context.new_page()
    console.run(console.book.queue("bulk").put_many(list(range(1_001))))
    page.goto(f"{console.url}/acts/queues.purge?queue=bulk&status=due")
    confirm(page, "bulk", "Delete entries")
    expect(page.get_by_role("heading", level=1)).to_have_text("Delete entries")
    found["queue_act"] = page.url.removeprefix(console.url)
    page.goto(f"{console.url}/acts/pipeline.start?kind=verify")
    confirm(page, None, "Start job")
    page.get_by_role("button", name="Cancel job").click()
    expect(page.locator("main .badge")).to_have_text("cancelled", timeout=60_000)
    found["job"] = page.url.removeprefix(console.url)
    context.close()
    journal = PAGES["journal"]
    return found | {
        "journal_live": link("/journal", live=True, **journal),
        "journal_filtered": link("/journal", where="payload.total > 0", **journal),
        "journal_missing": link("/journal", topic=journal["topic"], id="none"),
        "event_text": link("/event", form="text", **PAGES["event"]),
        "event_hex": link("/event", form="hex", **PAGES["event"]),
        "tag_live": link("/tag", live=True, **PAGES["tag"]),
        "queue_due": link("/queue", queue=QUEUE),
        "queue_processing": link("/queue", queue=QUEUE, status="processing"),
        "queue_filtered": link("/queue", queue=QUEUE, status="dead", reason="none"),
        "audit_checked": link("/audit", check=True),
        "doctor_files": link("/doctor", files=True),
        "confirm": link("/acts/journals.purge", **journal),
        "problem": "/nowhere",
        "problem_form": link("/journal", where="payload.n >", **journal),
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_axe_finds_no_problem_on_any_page(
    console: ServedConsole, browser: Browser, watched: Watched, addresses: dict[str, str], look: str
) -> None:
    viewport: Any = PHONE if look == "phone" else DESKTOP
    context = browser.new_context(viewport=viewport, color_scheme="dark" if look == "dark" else "light")
    page = context.new_page()
    watched.watch(page)
    problems: dict[str, list[str]] = {}
    try:
        for name, path in addresses.items():
            page.goto(console.url + path)
            page.screenshot(path=SCREENSHOTS / look / f"{name}.png")
            found = problems_of(page)
            if name not in WITHOUT_KEYS:
                page.keyboard.press("?")
                found += [] if page.locator("#keys").is_visible() else ["no keys are shown"]
            if found:
                problems[name] = found
    finally:
        context.close()
    assert problems == {}


async def _fill_hostile(book: Book) -> int:
    journal = book.journal("hostile")
    for text in HOSTILE.values():
        payload = {text: text, "deep": [{text: [text]}]}
        await journal.append(text, [Event(payload, tags={text}, type=text, metadata={text: text}), Event(text)])
    await journal.append("large", [Event("y" * LARGE_BYTES)])
    await (await book.wal("hostile").open_region(1, create=True)).write(1, [HOSTILE["markup"].encode()])
    queue = book.queue("hostile", settings=QueueSettings(max_timeouts=0))
    await queue.put_many([Entry(data={text: text}, key=text) for text in HOSTILE.values()])
    await queue.fail(await queue.claim(3, 600, together=False), reason=HOSTILE["markup"] + HOSTILE["script"])
    await queue.claim(1, 600, together=False)
    await book.outbox.publish_alone([message(topic="hostile", payload=b"x", key=HOSTILE["markup"].encode())])
    config = await journal.topic_config()
    id = HOSTILE["markup"]
    await book.log.append(Outgoing("hostile", partition_of(id, config.partitions), id.encode(), b"<b>no record</b>"))
    async with book.tags.subscribe(HOSTILE["script"], HOSTILE["markup"], follow=False) as events:
        async for _ in events:
            pass
    await book.settle()
    return (await queue.dead_letters())[0].id


@pytest.mark.timeout(300)
def test_hostile_strings_neither_run_nor_break_a_page(console: ServedConsole, page: Page) -> None:
    letter = console.call(_fill_hostile)
    paths = ["/topic?topic=hostile", "/tags", "/queues", "/queue?queue=hostile", "/", "/journals", "/doctor"]
    paths += [
        "/outbox",
        "/pipeline",
        "/wal",
        "/audit",
        "/tokens",
        "/settings",
        link("/sign-in", next=HOSTILE["script"]),
    ]
    paths += [link("/region", namespace="hostile", region=1)]
    paths += [link("/queue", queue="hostile", status=status) for status in ("dead", "processing")]
    paths += [link("/entry", queue="hostile", status="dead", place=letter)]
    for text in HOSTILE.values():
        journal = {"topic": "hostile", "id": text}
        paths += [
            link("/journal", **journal),
            link("/event", number=1, **journal),
            link("/tag", tag=text),
            link("/acts/journals.purge", **journal),
            link("/queue", queue="hostile", key=text),
            link("/topic", topic="hostile", prefix=text),
        ]
    paths += [link("/journal", topic="hostile", id="large")]
    paths += [link("/event", topic="hostile", id="large", number=1, form=form) for form in ("tree", "text", "hex")]
    seen = {path.partition("?")[0] for path in paths}
    # The page of an act shows no text of users; test_jobs opens that of a job with hostile ids.
    assert {page.path for page in CATALOG.pages.values()} - seen == {"/job", "/queue-act"}
    wide = []
    # A page is as wide as the window, and so is each of its tables, although these could be scrolled.
    overflows = (
        "[document.documentElement, ...document.querySelectorAll('.scroll')].some((e) => e.scrollWidth > e.clientWidth)"
    )
    for path in paths:
        answer = page.goto(console.url + path)
        assert answer is not None
        assert answer.status == 200, path
        assert len(answer.body()) < 1_000_000, path
        if page.evaluate(overflows):
            wide.append(path)
        assert page.locator("main img:not([src^='/static/']), main b, main script").count() == 0, path
    assert wide == []
    page.goto(console.url + link("/journal", topic="hostile", id=HOSTILE["markup"]))
    assert page.get_by_role("heading", level=1).inner_text() == HOSTILE["markup"]
    for name in ("path", "script", "rtl"):
        page.goto(console.url + link("/topic", topic="hostile", prefix=HOSTILE[name]))
        page.locator("ul.ids a").first.click()
        assert page.get_by_role("heading", level=1).text_content() == HOSTILE[name]
