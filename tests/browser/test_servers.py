"""One pass through the console's main flows on Kafka, Cassandra and PostgreSQL."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.served_console import ServedConsole, served_console
from tests.browser.test_acts import confirm
from tidebook import Book, Event
from tidebook.outbox.message import message
from tidebook.queue.port import QueueSettings

pytestmark = [pytest.mark.kafka, pytest.mark.cassandra, pytest.mark.postgres]


@pytest.fixture
def console(tmp_path: Path, kafka_bootstrap: str, cassandra_address: str, postgres_url: str) -> Iterator[ServedConsole]:
    where = tmp_path / "tidebook.toml"
    where.write_text(
        f'[log]\nurl = "kafka://{kafka_bootstrap}"\n'
        f'[store]\nurl = "cassandra://{cassandra_address}/console_tests"\n'
        f'[sql]\nurl = "{postgres_url}"\n'
    )
    with served_console(where, replicate=False) as served:
        yield served


def test_journals_a_queue_a_region_and_the_outbox_are_shown_and_changed(console: ServedConsole, page: Page) -> None:
    name = f"console-{uuid.uuid4().hex[:8]}"
    console.run(console.book.journal(name).append("o-1", [Event({"n": n}, tags={name}) for n in range(3)]))
    page.goto(f"{console.url}/journals?prefix={name}")
    page.get_by_role("link", name=name, exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(name)
    page.goto(f"{console.url}/journal?topic={name}&id=o-1&where=payload.n+%3E+1")
    expect(page.locator("#event-rows tr:not(.more)")).to_have_count(1)
    page.goto(f"{console.url}/journal?topic={name}&id=o-1&live=true")
    rows = page.locator("[data-live] tr")
    expect(rows).to_have_count(3)
    console.run(console.book.journal(name).append("o-1", [Event({"n": "live"})]))
    expect(rows.first).to_contain_text("live")
    page.goto(f"{console.url}/event?topic={name}&id=o-1&number=1")
    expect(page.get_by_text("append of 3 events")).to_be_visible()
    expect(page.get_by_text("Not replicated yet")).to_be_visible()
    page.goto(f"{console.url}/journal?topic={name}&id=o-1")
    page.get_by_text("Append by hand").click()
    page.get_by_label("Payload", exact=True).fill('{"by": "hand"}')
    page.get_by_role("button", name="Append").click()
    expect(page.get_by_role("status").first).to_have_text("Event 5 is appended.")
    page.get_by_label("Up to number").fill("2")
    page.get_by_role("button", name="Delete events").click()
    expect(page.get_by_text(f"This deletes 2 events of journal {name}/o-1")).to_be_visible()
    confirm(page, "o-1", "Delete events")
    expect(page.locator("#event-rows tr")).to_have_count(3)

    async def fail(book: Book) -> None:
        queue = book.queue(name, settings=QueueSettings(max_timeouts=0))
        await queue.put({"to": "ada"}, key="k")
        await queue.fail(await queue.claim(1, 60), reason="smtp 550")

    console.call(fail)
    page.goto(f"{console.url}/queue?queue={name}&status=dead")
    page.get_by_role("link", name="Retry all that match").click()
    page.get_by_role("button", name="Retry").click()
    expect(page.get_by_text("1 dead letter put back.")).to_be_visible()
    page.get_by_role("link", name="Due 1").click()
    expect(page.get_by_role("cell", name="k", exact=True)).to_be_visible()
    page.get_by_role("link", name="Delete all that match").click()
    expect(page.get_by_text(f"This deletes 1 waiting entry of queue {name}")).to_be_visible()
    confirm(page, name, "Delete entries")
    expect(page.get_by_text("1 entry deleted.")).to_be_visible()

    async def write(book: Book) -> None:
        await (await book.wal(name).open_region(1, create=True)).write(1, [b"a"] * 3)
        await book.outbox.publish_alone([message(topic=f"{name}-mails", payload=b"x", key=b"k")])

    console.call(write)
    page.goto(f"{console.url}/region?namespace={name}&region=1")
    page.get_by_role("link", name="Release all").click()
    expect(page.get_by_text("This marks 3 entries of table 1")).to_be_visible()
    confirm(page, "1", "Mark deleted")
    expect(page.get_by_role("row", name="1 0")).to_be_visible()
    page.goto(f"{console.url}/outbox")
    expect(page.get_by_role("row", name=f"{name}-mails")).to_contain_text("exactly once")
    for path in ("/", "/pipeline", "/outbox", "/wal", "/settings", "/doctor"):
        answer = page.goto(console.url + path)
        assert answer is not None
        assert answer.status == 200, path
