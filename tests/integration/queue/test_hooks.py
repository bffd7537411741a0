"""A command and a webhook run once for each dead letter, and again if they failed."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import tidebook
from tests.integration.queue.patience import until
from tidebook.core.errors import InvalidInput
from tidebook.queue import hooks as hooks_module
from tidebook.queue.hooks import Announcer, Hooks
from tidebook.queue.port import QueueSettings
from tidebook.queue.queue import Queue
from tidebook.runtime.metrics import Metrics

pytestmark = pytest.mark.postgres
#: Writes its input to a file.
COMMAND = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read())"

#: Bytes that are not an HTTP answer.
NO_HTTP = 0


class Webhook:
    """A web server that records dead letters, and answers with a chosen status."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.answers: list[int] = []
        webhook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                code = webhook.answers.pop(0) if webhook.answers else 200
                if code == NO_HTTP:
                    self.wfile.write(b"what?\r\n\r\n")
                    return
                self.send_response(code)
                self.end_headers()
                if code == 200:
                    webhook.received.append(json.loads(body))

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/flags"


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    webhook = Webhook()
    thread = threading.Thread(target=webhook.server.serve_forever)
    thread.start()
    yield webhook
    webhook.server.shutdown()
    thread.join()
    webhook.server.server_close()


@pytest.fixture
def reported(tmp_path: Path) -> Path:
    file = tmp_path / "reported"
    file.touch()
    return file


@pytest.fixture
def hooked(where: Path, tmp_path: Path, webhook: Webhook, reported: Path) -> Path:
    """Return a book with both hooks."""
    file = tmp_path / "hooked.toml"
    before = where.read_text() if where.suffix == ".toml" else 'folder = "data"\n[queue]\n'
    command = json.dumps([sys.executable, "-c", COMMAND, str(reported)])
    file.write_text(f'{before}dead_letter_webhook = "{webhook.url}"\ndead_letter_command = {command}\n')
    return file


async def make_dead(queue: Queue, *data: object) -> None:
    for each in data:
        await queue.put(each, key=str(each))
        await queue.fail(await queue.claim(), reason="no such address")


async def test_both_hooks_are_notified_of_a_dead_letter_once(hooked: Path, webhook: Webhook, reported: Path) -> None:
    async with tidebook.open(hooked) as book, tidebook.open(hooked) as other:
        queue = book.queue("mail", settings=QueueSettings(max_timeouts=0))
        await other.queue("mail").open()
        await make_dead(queue, "x")
        await until(lambda: bool(webhook.received))
        await until(lambda: bool(reported.read_text()))
        await until(lambda: sum(each.metrics.counted("queue_dead_letters_announced") for each in (book, other)) == 1)
        await make_dead(queue, "y")
        await until(lambda: len(webhook.received) == 2)
        await until(lambda: sum(each.metrics.counted("queue_dead_letters_announced") for each in (book, other)) == 2)
    (letter, _) = webhook.received
    assert (letter["queue"], letter["key"], letter["data"], letter["reason"]) == ("mail", "x", "x", "no such address")
    assert [json.loads(line)["key"] for line in reported.read_text().splitlines()] == ["x", "y"]


async def test_a_process_that_ends_right_after_a_dead_letter_reports_it_first(
    hooked: Path, webhook: Webhook, reported: Path
) -> None:
    async with tidebook.open(hooked) as book:
        await make_dead(book.queue("mail", settings=QueueSettings(max_timeouts=0)), "x", "y")
    assert sorted(letter["key"] for letter in webhook.received) == ["x", "y"]
    assert sorted(json.loads(line)["key"] for line in reported.read_text().splitlines()) == ["x", "y"]


async def test_the_timer_alone_makes_a_dead_letter_of_a_lease_that_expires_too_often(
    hooked: Path, webhook: Webhook
) -> None:
    async with tidebook.open(hooked) as book:
        queue = book.queue("mail", settings=QueueSettings(max_timeouts=0))
        await queue.put("x", key="k")
        await queue.claim(lease=0.05)
        await until(lambda: bool(webhook.received))
        assert webhook.received[0]["reason"] == "its lease ran out"
        assert [letter.key for letter in await queue.dead_letters()] == ["k"]
        assert book.metrics.counted("queue_dead") == 1


async def test_a_webhook_that_refuses_is_called_again(where: Path, webhook: Webhook) -> None:
    async with tidebook.open(where) as book:
        queue = book.queue("mail", settings=QueueSettings(max_timeouts=0))
        store = await book.queues._runtime.store()
        announce = Announcer(store, Hooks(webhook=webhook.url), metrics=Metrics(), hold_ms=50)
        webhook.answers = [500, 503]
        await queue.put("x")
        await queue.fail(await queue.claim())
        async with asyncio.timeout(60):
            while not webhook.received:
                await announce()
                await asyncio.sleep(0.02)
        assert len(webhook.received) == 1
        assert await store.unannounced(hold_ms=50) == []


async def test_an_answer_that_is_not_http_fails_only_its_dead_letter(where: Path, webhook: Webhook) -> None:
    async with tidebook.open(where) as book:
        queue = book.queue("mail", settings=QueueSettings(max_timeouts=0))
        store, metrics = await book.queues._runtime.store(), Metrics()
        announce = Announcer(store, Hooks(webhook=webhook.url), metrics=metrics, hold_ms=60_000)
        webhook.answers = [NO_HTTP]
        await make_dead(queue, "x", "y", "z")
        await announce()
        await announce()
        assert len(webhook.received) == len({letter["key"] for letter in webhook.received}) == 2
        assert (metrics.counted("queue_hook_failures"), metrics.counted("queue_dead_letters_announced")) == (1, 2)


async def test_without_a_hook_a_process_counts_every_dead_letter_that_is_raised_while_it_runs(where: Path) -> None:
    async with tidebook.open(where) as book:
        await make_dead(book.queue("mail", settings=QueueSettings(max_timeouts=0)), "old")
    async with tidebook.open(where) as book:
        queue = book.queue("mail")
        await queue.put_many(list(range(30)))
        await queue.fail(await queue.claim(30))
        await until(lambda: book.metrics.counted("queue_dead_letters_announced") == 30)


async def test_a_command_that_hangs_does_not_hold_up_the_timer(
    where: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "hangs.toml"
    before = where.read_text() if where.suffix == ".toml" else 'folder = "data"\n[queue]\n'
    command = json.dumps([sys.executable, "-c", "import time; time.sleep(600)"])
    file.write_text(f"{before}dead_letter_command = {command}\n")
    monkeypatch.setattr(hooks_module, "HOOK_S_MAX", 0.3)
    async with tidebook.open(file) as book:
        queue = book.queue("mail", settings=QueueSettings(max_timeouts=0))
        await make_dead(queue, "x")
        await queue.put("y")
        await queue.claim(lease=0.05)
        await until(lambda: book.metrics.counted("queue_dead") == 1)
        await until(lambda: book.metrics.counted("queue_hook_failures") >= 1)


async def test_without_a_hook_a_dead_letter_is_logged_and_left_to_processes_with_a_hook(
    where: Path, hooked: Path, webhook: Webhook, caplog: pytest.LogCaptureFixture
) -> None:
    async with tidebook.open(where) as book:
        await make_dead(book.queue("mail", settings=QueueSettings(max_timeouts=0)), "x")
        await until(lambda: ", key x: no such address" in caplog.text)
    async with tidebook.open(hooked) as book:
        await make_dead(book.queue("mail"), "y")
        await until(lambda: {letter["key"] for letter in webhook.received} == {"x", "y"})


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://x", "", "javascript:1"])
def test_a_webhook_must_be_a_web_address(url: str) -> None:
    with pytest.raises(InvalidInput, match="webhook"):
        Hooks(webhook=url)
