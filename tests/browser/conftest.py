"""Fixtures: one Chromium per module, and pages that fail a test when the browser reports an error."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

#: Debian's Chromium: nothing is downloaded by Playwright.
CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
DESKTOP = {"width": 1280, "height": 860}
PHONE = {"width": 390, "height": 780}
#: How long a test waits for what a page must show; a busy machine needs longer than Playwright's 5 s.
WAIT_MS = 30_000
expect.set_options(timeout=WAIT_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Run Chromium for the tests of a module."""
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            yield running
        finally:
            running.close()


class Watched:
    """Records what no page may do: report errors, run an injected script, or call another host."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.hosts: set[str] = set()

    def watch(self, page: Page) -> None:
        """Collect the errors and the hosts of a page."""
        page.on("pageerror", lambda error: self.errors.append(f"error: {error}"))
        page.on("console", self._on_console)
        page.on("dialog", self._on_dialog)
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))

    def _on_console(self, message: ConsoleMessage) -> None:
        # The browser reports a status of 4xx as an error; the test that expects it checks it.
        if message.type == "error" and "the server responded with a status of 4" not in message.text:
            self.errors.append(f"console: {message.text}")

    def _on_dialog(self, dialog: Any) -> None:
        self.errors.append(f"dialog: {dialog.message}")
        dialog.dismiss()


@pytest.fixture
def watched() -> Iterator[Watched]:
    """Fail the test if a page reported an error or called another host."""
    found = Watched()
    yield found
    assert not found.errors
    assert len(found.hosts) <= 1


@pytest.fixture
def page(browser: Browser, watched: Watched) -> Iterator[Page]:
    """Open a page of a desktop browser."""
    context = browser.new_context(viewport=DESKTOP)  # type: ignore[arg-type]
    opened = context.new_page()
    opened.set_default_timeout(WAIT_MS)
    watched.watch(opened)
    try:
        yield opened
    finally:
        context.close()
