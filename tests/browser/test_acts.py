"""Every act works in a real browser: with a dry run, a typed confirmation, and the result on the next page."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from sqlalchemy import create_engine

from tests.browser.served_console import ServedConsole, served_console
from tidebook import Book, Event
from tidebook.core.key import partition_of
from tidebook.log.port import Outgoing
from tidebook.queue.browse import BoundBrowser, EntryPlace
from tidebook.queue.entry import Entry
from tidebook.queue.job import Job
from tidebook.queue.port import QueueSettings
from tidebook.queue.worker import Worker
from tidebook.server.console.bulk import BulkAct
from tidebook.wal.meta import Pinned
from tidebook.wal.region import Region


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedConsole]:
    with served_console(tmp_path_factory.mktemp("acts") / "book") as served:
        yield served


def confirm(page: Page, word: str | None, button: str) -> None:
    """Type the confirmation and press the button."""
    if word is not None:
        page.get_by_label("to confirm").fill(word)
    page.locator("main").get_by_role("button", name=button).click()


def test_an_event_is_appended_read_in_three_forms_deleted_and_its_journal_purged(
    console: ServedConsole, page: Page
) -> None:
    page.goto(f"{console.url}/journal?topic=notes&id=n-1")
    expect(page.get_by_text("There is no such journal")).to_be_visible()
    for text in ('{"note": "first", "lines": [{"sku": "x"}]}', '{"note": "second"}'):
        if not page.get_by_label("Payload", exact=True).is_visible():
            page.get_by_text("Append by hand").click()
        page.get_by_label("Payload", exact=True).fill(text)
        page.get_by_label("Tags, separated by commas").fill("important")
        page.get_by_role("button", name="Append").click()
        expect(page.get_by_role("status").first).to_contain_text("is appended")
    page.get_by_role("link", name="1", exact=True).click()
    expect(page.locator(".tree").first).to_contain_text("sku x")
    console.call(lambda book: book.settle())
    page.reload()
    expect(page.get_by_text("the same bytes")).to_be_visible()
    page.get_by_role("link", name="Text", exact=True).click()
    expect(page.locator("pre").first).to_contain_text('"note": "first"')
    page.get_by_role("link", name="Hex", exact=True).click()
    expect(page.get_by_label("Bytes of the payload")).to_contain_text("7b 22 6e 6f 74 65")
    page.get_by_role("link", name="Next", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Event 2")
    page.goto(f"{console.url}/journal?topic=notes&id=n-1")
    page.get_by_label("Up to number").fill("1")
    page.get_by_role("button", name="Delete events").click()
    expect(page.get_by_text("This deletes 1 event of journal notes/n-1")).to_be_visible()
    confirm(page, "wrong", "Delete events")
    expect(page.get_by_role("alert")).to_contain_text("Nothing was done")
    confirm(page, "n-1", "Delete events")
    expect(page.locator("#event-rows tr")).to_have_count(1)
    page.get_by_role("link", name="Purge journal").click()
    confirm(page, "n-1", "Purge journal")
    expect(page.get_by_text("Journal n-1 is purged.")).to_be_visible()
    assert console.call(lambda book: book.journal("notes").pointer("n-1")) is None
    page.get_by_role("link", name="Delete topic").click()
    expect(page.get_by_text("This deletes topic notes with all its journals")).to_be_visible()
    confirm(page, "notes", "Delete topic")
    expect(page.get_by_text("Topic notes is deleted.")).to_be_visible()


def test_a_job_is_started_shows_that_it_runs_and_is_cancelled(console: ServedConsole, page: Page) -> None:
    console.run(console.book.journal("verified").append("v-1", [Event({"n": 1})]))
    page.goto(f"{console.url}/pipeline")
    page.get_by_label("Topics, separated by commas").fill("verified")
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_text("This compares store and log: 1 topic.")).to_be_visible()
    confirm(page, None, "Start job")
    expect(page.locator("main .badge")).to_have_text("running")
    page.get_by_role("button", name="Cancel job").click()
    expect(page.locator("main .badge")).to_have_text("cancelled")
    page.goto(f"{console.url}/pipeline")
    expect(page.get_by_role("row", name="verify")).to_contain_text("cancelled")


def test_a_filter_is_in_the_url_so_reload_back_and_a_shared_link_show_the_same_page(
    console: ServedConsole, page: Page
) -> None:
    events = [Event({"n": n}) for n in range(120)]
    console.run(console.book.journal("filters").append("f-1", events))
    page.goto(f"{console.url}/journal?topic=filters&id=f-1")
    page.get_by_label("Filter").fill("payload.n >= 40 and payload.n < 43")
    page.keyboard.press("Enter")
    rows = page.locator("#event-rows tr:not(.more)")
    expect(rows).to_have_count(3)
    shared, text = page.url, page.locator("#event-rows").inner_text()
    page.reload()
    assert page.locator("#event-rows").inner_text() == text
    rows.first.get_by_role("link").first.click()
    page.go_back()
    assert (page.url, page.locator("#event-rows").inner_text()) == (shared, text)
    other = page.context.new_page()
    other.goto(shared)
    assert other.locator("#event-rows").inner_text() == text
    page.get_by_label("Filter").fill("payload.n >")
    page.keyboard.press("Enter")
    expect(page.get_by_text("the filter ends where")).to_be_visible()
    expect(page.get_by_label("Filter")).to_have_value("payload.n >")
    page.get_by_label("Filter").fill("payload.n > 118")
    page.get_by_role("button", name="Try again").click()
    expect(rows).to_have_count(1)
    expect(page.get_by_role("heading", level=1)).to_have_text("f-1")


def test_a_live_view_shows_new_events_pauses_and_resumes(console: ServedConsole, page: Page) -> None:
    journal = console.book.journal("live")
    console.run(journal.append("l-1", [Event({"n": 1})]))
    page.goto(f"{console.url}/journal?topic=live&id=l-1&live=true")
    rows = page.locator("[data-live] tr")
    expect(rows).to_have_count(1)
    console.run(journal.append("l-1", [Event({"n": 2})]))
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text('{"n":2}')
    page.get_by_role("button", name="Pause").click()
    console.run(journal.append("l-1", [Event({"n": 3})]))
    expect(page.locator("[data-live-status]")).to_contain_text("1 new")
    expect(rows).to_have_count(2)
    page.get_by_role("button", name="Resume").click()
    expect(rows).to_have_count(3)
    expect(rows.first).to_contain_text('{"n":3}')


def test_a_live_tag_shows_events_as_the_horizon_passes_them(console: ServedConsole, page: Page) -> None:
    journal = console.book.journal("tagged")
    console.run(journal.append("t-1", [Event({"n": 1}, tags={"hot"})]))
    console.call(lambda book: book.settle())
    page.goto(f"{console.url}/tag?tag=hot")
    expect(page.get_by_role("cell", name='{"n":1}')).to_be_visible()
    page.get_by_role("link", name="Live").click()
    expect(page.locator("[data-live-status]")).to_contain_text("Connected")
    console.run(journal.append("t-1", [Event({"n": 2}, tags={"hot"})]))
    expect(page.locator("[data-live] tr").first).to_contain_text('{"n":2}')
    page.get_by_role("link", name="Stop").click()
    page.get_by_role("link", name="Rebuild tag").click()
    confirm(page, None, "Rebuild tag")
    expect(page.get_by_role("status").first).to_contain_text("2 rows written")


async def _dead_letters(book: Book, name: str) -> None:
    queue = book.queue(name, settings=QueueSettings(max_timeouts=0))
    await queue.put_many([Entry(data={"to": n}, key=f"k-{n}") for n in range(6)])
    await queue.fail(await queue.claim(4, 600, together=False), reason="smtp 550")


def test_dead_letters_are_edited_retried_in_order_and_dropped(console: ServedConsole, page: Page) -> None:
    console.call(lambda book: _dead_letters(book, "mail"))
    page.goto(f"{console.url}/queue?queue=mail&status=dead")
    rows = page.locator(".rows tbody tr")
    expect(rows).to_have_count(4)
    rows.nth(3).get_by_role("link").first.click()
    page.get_by_role("textbox", name="Data").fill('{"to": "corrected"}')
    page.get_by_role("button", name="Save and retry").click()
    expect(page.get_by_text("the dead letter is put back")).to_be_visible()
    expect(rows).to_have_count(3)
    rows.nth(0).get_by_role("checkbox").check()
    page.reload()  # the selection is in the address
    expect(rows.nth(0).get_by_role("checkbox")).to_be_checked()
    page.get_by_role("button", name="Drop 1 selected").click()
    page.get_by_role("link", name="Cancel").click()
    expect(rows.nth(0).get_by_role("checkbox")).to_be_checked()
    page.get_by_role("button", name="Drop 1 selected").click()
    expect(page.get_by_text("This deletes 1 dead letter of queue mail")).to_be_visible()
    confirm(page, "mail", "Drop")
    expect(rows).to_have_count(2)
    page.get_by_role("link", name="Retry all that match").click()
    expect(page.get_by_text("This puts 2 dead letters back into queue mail")).to_be_visible()
    confirm(page, None, "Retry")
    expect(page.get_by_text("2 dead letters put back.")).to_be_visible()

    async def claimed(book: Book) -> list[Any]:
        return [job.data for job in await book.queue("mail").claim(10, 600, together=False)]

    assert console.call(claimed) == [{"to": 4}, {"to": 5}, {"to": "corrected"}, {"to": 1}, {"to": 2}]
    page.goto(f"{console.url}/queue?queue=mail&status=processing")
    expect(rows).to_have_count(5)
    expect(page.get_by_role("heading", name="Claims of other programs")).to_be_visible()


def test_entries_are_put_by_hand_found_by_key_and_purged_by_filter(console: ServedConsole, page: Page) -> None:
    console.run(console.book.queue("jobs").put_many([Entry(data=n, key=f"j-{n}", priority=n % 2) for n in range(10)]))
    page.goto(f"{console.url}/queue?queue=jobs")
    page.get_by_text("Put by hand").click()
    page.get_by_label("Data", exact=True).fill('{"by": "hand"}')
    page.locator("form[action='/acts/queues.put']").get_by_label("Key").fill("by-hand")
    page.get_by_role("button", name="Put", exact=True).click()
    expect(page.get_by_text("The entry is put.")).to_be_visible()
    page.get_by_role("searchbox", name="Key").fill("by-hand")
    page.keyboard.press("Enter")
    expect(page.locator(".rows tbody tr")).to_have_count(1)
    page.goto(f"{console.url}/queue?queue=jobs&priority=1")
    page.get_by_role("link", name="Delete all that match").click()
    expect(page.get_by_text("This deletes 5 waiting entries of queue jobs")).to_be_visible()
    confirm(page, "jobs", "Delete entries")
    expect(page.get_by_text("5 entries deleted.")).to_be_visible()
    expect(page.locator(".rows tbody tr")).to_have_count(6)


def test_a_queue_is_paused_and_resumed_and_its_workers_are_seen(console: ServedConsole, page: Page) -> None:
    queue, release = console.book.queue("orders"), asyncio.Event()

    async def handle(job: Job) -> None:
        await release.wait()

    async def start(book: Book) -> tuple[Worker, asyncio.Task[None]]:
        await queue.put_many([1, 2])
        worker = Worker(queue, handle, concurrency=1, label="<b>worker</b> one")
        running = asyncio.create_task(worker.run())
        while not await queue.workers() or not (await queue.status()).processing:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return worker, running

    worker, running = console.call(start)
    page.goto(f"{console.url}/queue?queue=orders")
    row = page.get_by_role("row", name="<b>worker</b> one")
    expect(row).to_contain_text("live")
    row.get_by_role("link", name="1", exact=True).click()
    expect(page.locator("table.events tbody tr")).to_have_count(1)
    expect(page.locator("table.events tbody tr")).to_contain_text("<b>worker</b> one")
    page.locator("table.events tbody tr").get_by_role("link").first.click()
    expect(page.get_by_text("<b>worker</b> one")).to_be_visible()
    page.goto(f"{console.url}/queue?queue=orders")
    page.get_by_role("button", name="Pause queue").click()
    expect(page.get_by_role("status").first).to_contain_text("is paused")
    expect(page.get_by_text("Paused since")).to_be_visible()
    page.goto(f"{console.url}/queues?prefix=orders")
    expect(page.get_by_role("row", name="orders")).to_contain_text("paused")
    console.run(_set(release))
    page.goto(f"{console.url}/queue?queue=orders")
    expect(page.get_by_role("link", name="Due 1")).to_be_visible()
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_text("is resumed")).to_be_visible()

    async def end(book: Book) -> None:
        async with asyncio.timeout(60):
            while (await queue.status()).waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        worker.stop()
        await running

    console.call(end)
    page.reload()
    expect(page.get_by_text("No worker works on this queue")).to_be_visible()


async def _set(event: asyncio.Event) -> None:
    event.set()


def test_a_purge_of_all_that_match_runs_in_the_background_with_progress_until_it_is_cancelled(
    console: ServedConsole, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = console.book.queue("bulk")
    console.run(queue.put_many([Entry(data=n, priority=n % 2) for n in range(3_000)]))
    page.goto(f"{console.url}/queue?queue=bulk&priority=1")
    page.get_by_role("link", name="Delete all that match").click()
    expect(page.get_by_text("This deletes 1,500 waiting entries of queue bulk")).to_be_visible()
    confirm(page, "bulk", "Delete entries")
    expect(page.get_by_text("1,500 of 1,500")).to_be_visible()
    expect(page.locator("main .badge")).to_have_text("done")
    assert console.run(queue.status()).waiting == 1_500
    remove, cancel, cancelled, removed = BoundBrowser.remove, BulkAct.cancel, asyncio.Event(), list[int]()

    async def remove_slowly(self: BoundBrowser, places: Sequence[EntryPlace]) -> int:
        if removed:  # the second page ends after the act was cancelled
            await cancelled.wait()
        removed.append(await remove(self, places))
        return removed[-1]

    async def cancel_act(self: BulkAct) -> None:
        cancelled.set()
        await cancel(self)

    monkeypatch.setattr(BoundBrowser, "remove", remove_slowly)
    monkeypatch.setattr(BulkAct, "cancel", cancel_act)
    page.goto(f"{console.url}/queue?queue=bulk&priority=0")
    page.get_by_role("link", name="Delete all that match").click()
    confirm(page, "bulk", "Delete entries")
    page.locator("main").get_by_role("button", name="Cancel").click()
    expect(page.locator("main .badge")).to_have_text("cancelled")
    expect(page.get_by_text("Cancelled after 1,000 of 1,500.")).to_be_visible()
    assert console.run(queue.status()).waiting == 500


def test_a_forced_flush_reaches_the_owner_of_a_region(console: ServedConsole, page: Page) -> None:
    async def own(book: Book) -> Region:
        async def flush(pinned: Pinned) -> None:
            await region.mark_deleted(pinned.table, region.meta.tables[pinned.table].next_seq_num)

        region = await book.wal("owned").open_region(1, create=True, on_pinned=flush)
        await region.write(5, [b"a"] * 3)
        return region

    region = console.call(own)
    page.goto(f"{console.url}/region?namespace=owned&region=1")
    page.get_by_role("row", name="5 3").get_by_role("button", name="Force flush").click()
    expect(page.get_by_text("The owner is asked to flush table 5")).to_be_visible()
    expect(page.get_by_role("row", name="5 3")).to_contain_text("flush requested")
    console.run(region.clean())
    page.reload()
    expect(page.get_by_text("flush requested")).to_have_count(0)
    expect(page.get_by_role("row", name="5 0")).to_be_visible()


def test_a_parked_record_is_replayed_as_a_new_append(console: ServedConsole, page: Page) -> None:
    async def park(book: Book) -> None:
        await book.journal("notes").append("parked-1", [Event({"n": 1})])
        config = await book.journal("notes").topic_config()
        partition = partition_of("parked-1", config.partitions)
        await book.log.append(Outgoing("notes", partition, b"parked-1", b'{"from": "elsewhere"}'))
        await book.settle()

    console.call(park)
    page.goto(f"{console.url}/pipeline")
    row = page.get_by_role("row", name="parked-1")
    row.get_by_role("button", name="Replay").click()
    confirm(page, "notes", "Replay")
    expect(page.get_by_text("it can be replayed only as raw bytes")).to_be_visible()
    page.goto(f"{console.url}/pipeline")
    row.get_by_label("raw bytes").check()
    row.get_by_role("button", name="Replay").click()
    expect(page.get_by_text("to the end of journal parked-1")).to_be_visible()
    confirm(page, "notes", "Replay")
    expect(page.get_by_text("The record is replayed as events 2 to 2.")).to_be_visible()
    page.goto(f"{console.url}/pipeline")
    expect(page.get_by_text("No record is parked.")).to_be_visible()


def test_a_region_is_snapshotted_cleaned_released_and_deleted(console: ServedConsole, page: Page) -> None:
    async def write(book: Book) -> None:
        region = await book.wal("metrics").open_region(7, create=True)
        await region.write(1, [b"a"] * 3)
        await region.write(2, [b"b"])

    console.call(write)
    page.goto(f"{console.url}/wal")
    page.get_by_role("link", name="metrics/7").click()
    page.get_by_role("button", name="Write a snapshot").click()
    expect(page.get_by_text("A snapshot as of offset")).to_be_visible()
    page.get_by_role("row", name="1 3 1").get_by_role("link", name="Release all").click()
    expect(page.get_by_text("This marks 3 entries of table 1")).to_be_visible()
    confirm(page, "1", "Mark deleted")
    page.get_by_role("button", name="Clean").click()
    expect(page.get_by_text("Cleaned:")).to_be_visible()
    page.get_by_role("row", name="2 1 1").get_by_role("link", name="Drop table").click()
    confirm(page, "2", "Drop table")
    page.get_by_role("link", name="Delete region").click()
    confirm(page, "metrics/7", "Delete region")
    expect(page.get_by_text("Region metrics/7 is deleted.")).to_be_visible()


def test_parked_messages_are_retried_and_dropped(console: ServedConsole, page: Page) -> None:
    async def park(book: Book) -> str:
        engine = create_engine(book.outbox.url)
        try:
            with engine.begin() as connection:
                for n in range(3):
                    book.outbox.append(connection, "parked", f"p-{n}", [Event(n)], expected=99)
        finally:
            engine.dispose()
        await book.outbox.relay(once=True)
        return (await book.outbox.parked())[0].topic

    topic = console.call(park)
    page.goto(f"{console.url}/outbox?topic={topic}")
    rows = page.locator("section .rows tbody tr")
    expect(rows).to_have_count(3)
    rows.first.get_by_role("link", name="Drop").click()
    confirm(page, topic, "Drop")
    expect(page.get_by_text("1 message deleted.")).to_be_visible()
    page.goto(f"{console.url}/outbox?topic={topic}")
    page.get_by_role("link", name="Retry all").click()
    confirm(page, None, "Retry")
    expect(page.get_by_text("2 messages retried.")).to_be_visible()


def test_a_token_is_created_shown_once_and_revoked(console: ServedConsole, page: Page) -> None:
    page.goto(f"{console.url}/tokens")
    page.get_by_label("Name", exact=True).fill("ops")
    page.get_by_label("Role").select_option("admin")
    page.get_by_role("button", name="Create token").click()
    secret = page.locator(".secret").inner_text()
    assert secret.startswith("tb_")
    page.goto(f"{console.url}/tokens")  # there is a token now: this browser must sign in
    page.get_by_label("Token").fill(secret)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_text(secret)).to_have_count(0)
    page.get_by_role("link", name="Revoke").click()
    confirm(page, "ops", "Revoke token")
    expect(page.get_by_label("Token")).to_be_visible()
