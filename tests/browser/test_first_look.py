"""The console opens, a token signs in to it, and its pages link to one another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.browser.served_console import ServedConsole, create_token, served_console
from tidebook import Event
from tidebook.core.errors import Unavailable

SCAN = "tidebook.server.console.journal.scan_events"


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedConsole]:
    with served_console(tmp_path_factory.mktemp("console") / "book") as served:
        served.run(served.book.journal("orders").append("o-1", [Event({"total": 3}, tags={"paid"})]))
        yield served


def test_the_address_that_is_printed_shows_the_overview(console: ServedConsole, page: Page) -> None:
    page.goto(console.url)
    expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
    expect(page.get_by_text("Nothing: everything runs.")).to_be_visible()
    page.get_by_role("link", name="Journals").click()
    expect(page).to_have_url(f"{console.url}/journals")
    page.get_by_role("link", name="orders").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("orders")
    expect(page.get_by_role("link", name="o-1")).to_be_visible()


def test_keys_open_the_pages_and_a_question_mark_lists_the_keys(console: ServedConsole, page: Page) -> None:
    page.goto(console.url)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.keyboard.press("g")
    page.keyboard.press("j")
    expect(page).to_have_url(f"{console.url}/journals")
    page.keyboard.press("/")
    expect(page.locator("[data-search]")).to_be_focused()
    page.keyboard.type("ord")
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{console.url}/journals?prefix=ord")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page).to_have_url(f"{console.url}/topic?topic=orders")


def test_keys_of_single_characters_can_be_turned_off(console: ServedConsole, page: Page) -> None:
    page.goto(console.url)
    page.keyboard.press("?")
    page.get_by_label("Keys without Ctrl or Alt").uncheck()
    page.get_by_role("button", name="Close").click()
    page.reload()
    page.keyboard.press("?")
    page.keyboard.press("g")
    page.keyboard.press("j")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.get_by_role("button", name="Keys").click()
    page.get_by_label("Keys without Ctrl or Alt").check()
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("j")
    expect(page).to_have_url(f"{console.url}/journals")


def test_charts_show_the_history_and_its_latest_values(
    tmp_path: Path, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidebook.server.history.SAMPLE_EVERY_S", 0.05)
    with served_console(tmp_path / "book") as served:
        served.run(served.book.journal("orders").append("o-1", [Event({"total": 3})]))
        while len(httpx.get(f"{served.url}/v1/history").json()["samples"]) < 3:
            pass
        page.goto(f"{served.url}/?hours=0.25")
        expect(page.locator("[data-chart] .u-over")).to_have_count(3)
        expect(page.locator("[data-chart=lag] .u-legend")).to_contain_text("records0")
        expect(page.get_by_role("link", name="15 min")).to_have_attribute("aria-current", "true")
        page.get_by_role("link", name="6 h").click()
        expect(page).to_have_url(f"{served.url}/?hours=6.0")
        expect(page.locator("[data-chart] .u-over")).to_have_count(3)
        page.goto("about:blank")  # the overview would ask a server that has stopped


def test_a_page_whose_session_has_ended_leads_to_the_sign_in(tmp_path: Path, page: Page) -> None:
    token = create_token(tmp_path / "book", "viewer")
    with served_console(tmp_path / "book") as served:
        page.goto(served.url)
        page.get_by_label("Token").fill(token.token)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
        page.context.clear_cookies()
        expect(page).to_have_url(f"{served.url}/sign-in?next=%2F")  # at the next refresh of the numbers


def test_a_page_that_is_no_longer_refreshed_says_so(console: ServedConsole, browser: Browser) -> None:
    context = browser.new_context()  # not watched: the browser reports each failed request as an error
    page = context.new_page()
    try:
        page.goto(console.url)
        page.route("**/", lambda route: route.abort())
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text("The server does not answer. This page is as of")
        page.unroute("**/")
        expect(alert).to_be_hidden()
    finally:
        context.close()


def test_a_search_that_fails_says_why_and_can_be_continued(
    console: ServedConsole, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*args: object) -> None:
        raise Unavailable("the store does not answer")

    console.run(console.book.journal("search").append("s-1", [Event({"n": n}) for n in range(60)]))
    context = browser.new_context()
    page = context.new_page()
    try:
        with monkeypatch.context() as patched:
            patched.setattr("tidebook.server.console.journal.SCAN_EVENTS_MAX", 20)

            def fail_from_here(route: Route) -> None:
                patched.setattr(SCAN, fail)
                route.continue_()

            page.route("**/journal?*at=*", fail_from_here)
            page.goto(f"{console.url}/journal?topic=search&id=s-1&where=payload.n+%3E%3D+0")
            alert = page.locator("tr.more").get_by_role("alert")
            expect(alert).to_have_text("The server answers 503: the store does not answer. The search has stopped.")
            expect(page.get_by_role("button", name="Stop")).to_have_count(0)
            page.unroute("**/journal?*at=*")
        page.get_by_role("link", name="Continue from here").click()
        expect(page.locator("#event-rows tr:not(.more)")).to_have_count(40)
    finally:
        context.close()


def test_the_first_tab_reaches_the_skip_link(console: ServedConsole, page: Page) -> None:
    page.goto(console.url)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()


def test_the_theme_is_stored_in_a_cookie(console: ServedConsole, page: Page) -> None:
    page.goto(console.url)
    html = page.locator("html")
    expect(html).to_have_attribute("data-theme", "auto")
    page.keyboard.press("t")
    page.keyboard.press("t")
    expect(html).to_have_attribute("data-theme", "dark")
    page.goto(f"{console.url}/journals")
    expect(html).to_have_attribute("data-theme", "dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(17, 21, 27)"


def test_every_answer_forbids_scripts_of_the_page_and_other_hosts(console: ServedConsole) -> None:
    for path in ("/", "/overview.json", "/journals", "/nothing", "/acts/topics.delete?topic=orders"):
        answer = httpx.get(console.url + path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["cache-control"] == "no-store"


def test_a_browser_signs_in_with_a_token_and_out_again(tmp_path: Path, page: Page) -> None:
    token = create_token(tmp_path / "book", "viewer")
    with served_console(tmp_path / "book") as served:
        page.goto(f"{served.url}/journals?prefix=x")
        expect(page).to_have_url(f"{served.url}/sign-in?next=%2Fjournals%3Fprefix%3Dx")
        page.get_by_label("Token").fill("tb_wrong")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_text("the token is unknown, revoked or expired")).to_be_visible()
        page.go_back()
        page.get_by_label("Token").fill(token.token)
        page.get_by_role("button", name="Sign in").click()
        expect(page).to_have_url(f"{served.url}/journals?prefix=x")
        expect(page.get_by_text("Signed in as viewer.")).to_be_visible()
        page.reload()
        expect(page.get_by_text("Signed in as viewer.")).to_have_count(0)
        page.get_by_role("button", name="Sign out").click()
        expect(page).to_have_url(f"{served.url}/sign-in")
        page.goto(served.url)
        expect(page).to_have_url(f"{served.url}/sign-in?next=%2F")
        assert httpx.get(f"{served.url}/journals.json").status_code == 401
