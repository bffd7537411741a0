"""The jobs of the pipeline run in a real browser: verify shows each difference, and a button repairs them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.served_console import ServedConsole, served_console
from tests.browser.test_acts import confirm
from tests.browser.test_looks import HOSTILE, problems_of
from tidebook import Event
from tidebook.server.pipeline_jobs import PipelineJob
from tidebook.sqlite.checksums import connect

pytestmark = pytest.mark.timeout(400)
#: How long a job may take; it starts its own Spark.
JOB_MS = 120_000
#: Replaces the command of a job: reports its progress, waits for a line in a named pipe, prints its result and exits.
STAND_IN = """
import sys
print('{"progress":{"tasks":4,"done":3}}', flush=True)
open(sys.argv[1]).readline()
sys.stderr.write("the disk is full")
print(sys.argv[2])
exit(int(sys.argv[3]))
"""


@pytest.fixture
def console(tmp_path: Path) -> Iterator[ServedConsole]:
    exports = tmp_path / "exports"
    (tmp_path / "tidebook.toml").write_text(f'folder = "book"\n[server]\nexport_folder = "{exports}"\n')
    with served_console(tmp_path / "tidebook.toml") as served:
        yield served


def choose_job(page: Page, console: ServedConsole, kind: str, *, to: str = "") -> None:
    """Request the dry run of a job of one topic on the pipeline's page."""
    page.goto(f"{console.url}/pipeline")
    page.locator("select[name=kind]").select_option(kind)
    page.get_by_label("Topics, separated by commas").fill("orders")
    page.get_by_label("Export to").fill(to)
    page.get_by_role("button", name="Start").click()


def run_job(page: Page, console: ServedConsole, kind: str, word: str | None, *, to: str = "") -> None:
    """Start a job of one topic, and wait until it has ended."""
    choose_job(page, console, kind, to=to)
    confirm(page, word, "Start job")
    expect(page.get_by_role("heading", name=f"Job {kind}")).to_be_visible()
    expect(page.locator("main .badge")).not_to_have_text("running", timeout=JOB_MS)


@pytest.mark.spark
def test_differences_are_shown_and_repaired(console: ServedConsole, page: Page, tmp_path: Path) -> None:
    journal = console.book.journal("orders")
    hostile = HOSTILE["markup"]
    console.run(journal.append("o-1", [Event({"n": 1}, tags={"paid"}), Event({"n": 2})]))
    console.run(journal.append(hostile, [Event({"n": 1}), Event({"n": 2})]))
    console.call(lambda book: book.settle())
    store = connect(tmp_path / "book" / "store.db")
    store.execute("DELETE FROM journal WHERE seq_nr = 2")
    store.close()
    run_job(page, console, "verify", None)
    expect(page.locator("main .badge")).to_have_text("differences")
    expect(page.get_by_role("row", name="orders/o-1")).to_contain_text("event missing")
    expect(page.get_by_role("row", name="orders/o-1").get_by_role("cell").first).to_have_text("2")
    expect(page.get_by_role("link", name=f"orders/{hostile}")).to_be_visible()
    assert page.locator("main img, main b, main script").count() == 0
    assert problems_of(page) == []
    page.get_by_role("link", name="Repair").click()
    expect(page.get_by_text("repairs what differs (2 differences when it was last compared): 1 topic")).to_be_visible()
    confirm(page, "verify", "Start job")
    expect(page.locator("main .badge")).not_to_have_text("running", timeout=JOB_MS)
    expect(page.locator("main .badge")).to_have_text("done")

    async def payloads() -> list[object]:
        return [event.payload async for event in journal.read("o-1")]

    assert console.run(payloads()) == [{"n": 1}, {"n": 2}]


@pytest.mark.spark
@pytest.mark.parametrize(
    ("kind", "word", "to", "does"),
    [
        ("rebuild", "rebuild", "", "This writes the store again from the log: 1 topic."),
        ("export", None, "sales", "This exports events to sales: 1 topic."),
    ],
)
def test_a_rebuild_and_an_export_are_confirmed_shown_while_they_run_and_cancelled(
    console: ServedConsole, page: Page, kind: str, word: str | None, to: str, does: str
) -> None:
    choose_job(page, console, kind, to=to)
    expect(page.get_by_text(does)).to_be_visible()
    if word is not None:
        confirm(page, "verify", "Start job")
        expect(page.get_by_role("alert")).to_contain_text("Nothing was done")
    confirm(page, word, "Start job")
    expect(page.get_by_role("heading", name=f"Job {kind}")).to_be_visible()
    expect(page.get_by_label("The job runs")).to_be_visible()
    page.get_by_role("button", name="Cancel job").click()
    expect(page.locator("main .badge")).to_have_text("cancelled")


@pytest.mark.parametrize(
    ("kind", "result", "code", "state", "shown"),
    [
        (
            "rebuild",
            '{"journals":2,"events":3,"differences":{"event missing":1},"repaired":1,"left":0,"partial":[]}',
            0,
            "done",
            "2 journals with 3 events compared: 1 difference, 1 repaired, 0 left.",
        ),
        ("export", '{"batches":1,"events":3,"seconds":25.7,"offsets":{}}', 0, "done", "3 events exported."),
        ("export", "{}", 2, "failed", "the disk is full"),
    ],
)
def test_a_job_shows_its_progress_and_then_its_result(
    console: ServedConsole, page: Page, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    kind: str, result: str, code: int, state: str, shown: str,
) -> None:  # fmt: skip
    run, pipe = PipelineJob.run, tmp_path / "pipe"
    os.mkfifo(pipe)

    async def run_stand_in(self: PipelineJob, command: list[str]) -> None:
        await run(self, [sys.executable, "-c", STAND_IN, str(pipe), result, str(code)])

    monkeypatch.setattr(PipelineJob, "run", run_stand_in)
    choose_job(page, console, kind, to="sales" if kind == "export" else "")
    confirm(page, "rebuild" if kind == "rebuild" else None, "Start job")
    expect(page.get_by_text("Spark has done 3 of the 4 tasks")).to_be_visible()
    expect(page.get_by_label("The job runs")).to_have_attribute("value", "3")
    pipe.write_text("go on\n")
    expect(page.locator("main .badge")).to_have_text(state)
    expect(page.get_by_text(shown)).to_be_visible()
    expect(page.get_by_label("The job runs")).to_have_count(0)
    assert problems_of(page) == []


# Each job starts a separate Spark, which takes more processor time than all other tests of the console.
@pytest.mark.spark
@pytest.mark.long
def test_a_rebuild_and_an_export_run_to_their_result(console: ServedConsole, page: Page, tmp_path: Path) -> None:
    journal = console.book.journal("orders")
    console.run(journal.append("o-1", [Event({"n": 1})]))
    run_job(page, console, "rebuild", "rebuild")
    expect(page.locator("main .badge")).to_have_text("done")
    run_job(page, console, "export", None, to="orders")
    expect(page.locator("main .badge")).to_have_text("done")
    assert list((tmp_path / "exports").rglob("*.parquet"))
