"""Attacks on the console: extreme and hostile values in every field, and masked fields in live views."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.integration.server.conftest import CreateToken
from tests.integration.server.console_book import ACTS, LIVES, PAGES, fill, filled
from tests.integration.server.running import client, live_rows, served
from tidebook import Book, Event
from tidebook.queue.port import QueueSettings
from tidebook.server.console.act import Act
from tidebook.server.console.catalog import CATALOG
from tidebook.server.console.page import Page

#: Encoded as in an address: out of range, not finite, a NUL, invalid UTF-8, and text that a page must not run.
HOSTILE = (
    "9" * 30,
    "1e999",
    "%00",
    "%ff%ed%a0%80",
    quote("<script>alert(1)</script>\"'><img src=x onerror=alert(1)>{{7*7}}\u202e' OR 1=1; --👩‍👩‍👧‍👦"),
)


def encoded(fields: dict[str, str]) -> str:
    return "&".join(f"{name}={quote(value)}" for name, value in fields.items())


def check(answer: httpx.Response, asked: str) -> None:
    assert answer.status_code < 500, (asked[:200], answer.text[-500:])
    if "json" in answer.headers.get("content-type", ""):  # a browser does not run JSON
        return
    assert "<script>alert" not in answer.text, asked
    assert "<img src=x" not in answer.text, asked
    assert ">49<" not in answer.text, asked


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["pages", "acts"])
async def test_no_value_of_a_field_makes_the_server_fail_or_is_run(tmp_path: Path, kind: str) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        known = await fill(book)
        await book.settle()
        targets: list[tuple[Page | Act, dict[str, Any]]] = (
            [(CATALOG.pages[name], fields) for name, fields in PAGES.items()]
            if kind == "pages"
            else [(CATALOG.acts[name], fields) for name, fields in ACTS.items()]
        )
        asked = 0
        for target, example in targets:
            given = filled(example, known)
            struct = target.query if isinstance(target, Page) else target.form
            for name in struct.__struct_fields__:
                others = encoded({each: value for each, value in given.items() if each != name})
                for value in HOSTILE:
                    query = f"{others}&{name}={value}"
                    if isinstance(target, Page):
                        for path in (target.path, target.twin):
                            check(await http.get(f"{path}?{query}"), f"{path}?{query}")
                    else:
                        if target.preview is not None:
                            check(await http.get(f"{target.path}?{query}"), f"{target.path}?{query}")
                        form = {"content-type": "application/x-www-form-urlencoded"}
                        check(await http.post(target.path, content=query, headers=form), f"POST {query}")
                    asked += 1
        assert asked > 150


async def test_a_live_view_hides_masked_fields_unless_an_admin_asks_for_them(tmp_path: Path) -> None:
    (tmp_path / "tidebook.toml").write_text('folder = "book"\n[mask]\n"*.*.card" = "hide"\n')
    async with served(tmp_path / "tidebook.toml") as (url, book), client(url) as http:
        await fill(book)
        path, fields = CATALOG.lives["journal.live"].path, LIVES["journal.live"]
        rows = [row for _, row in await live_rows(http, path, fields, 3)]
        assert all("***" in row and "4111" not in row for row in rows)
        rows = [row for _, row in await live_rows(http, path, {**fields, "unmask": "true"}, 3)]
        assert all("4111" in row for row in rows)


async def test_an_act_leads_to_no_other_server(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        for back in (
            "//evil.example", "/\\evil.example", "\\\\evil.example", "https://evil.example", "javascript:alert(1)",
            "/\t/evil.example", "/\r\nlocation: https://evil.example", "/\u202eevil", "evil.example", " //evil.example",
        ):  # fmt: skip
            done = await http.post("/acts/queues.pause", data={"queue": "mail", "back": back})
            assert (done.status_code, done.headers["location"]) == (303, "/"), back
            asked = await http.get("/acts/journals.purge", params={"topic": "orders", "id": "o-1", "back": back})
            assert '<a class="button" href="/">Cancel</a>' in asked.text, back
        done = await http.post("/acts/queues.pause", data={"queue": "mail", "back": "/queue?queue=mail"})
        assert done.headers["location"] == "/queue?queue=mail"


async def test_a_get_changes_nothing(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        known = await fill(book)
        for name, act in CATALOG.acts.items():
            answer = await http.get(act.path, params=filled(ACTS[name], known))
            if act.preview is None:
                assert answer.status_code == 405, name
        assert (await http.get("/audit.json")).json()["chains"] == []
        assert len([event async for event in book.journal("orders").read("o-1")]) == 5
        assert len(await book.queue("mail").dead_letters()) == 2


async def test_no_file_outside_the_folders_is_read_or_written(tmp_path: Path) -> None:
    exports = tmp_path / "exports"
    (tmp_path / "tidebook.toml").write_text(f'folder = "book"\n[server]\nexport_folder = "{exports}"\n')
    async with served(tmp_path / "tidebook.toml") as (url, _), client(url) as http:
        for name in ("..%2f__init__.py", "%2e%2e/console.py", "..%5cconsole.py", "htmx.LICENSE", "console.js%00.css"):
            assert (await http.get(f"/static/0/{name}")).status_code == 404, name
        for to in ("../book", "/etc", str(tmp_path), "a/../../book", "a\0b", ""):
            answer = await http.get("/acts/pipeline.start", params={"kind": "export", "to": to})
            assert answer.status_code == 400, to
        assert (await http.get("/acts/pipeline.start", params={"kind": "export", "to": "a/../b"})).status_code == 200


#: Filters that would reveal a masked field if their results for a viewer depended on its value.
ORACLES = (
    'payload.card = "{}"',
    'payload.card begins "{}"',
    'payload.card > "{}"',
    'payload["card"] contains "{}"',
    'text contains "{}"',
    'meta.card = "{}"',
    'not payload.card != "{}"',
    'payload.deep[0].card = "{}"',
)


async def _masked(book: Book, card: str) -> None:
    payload = {"card": card, "deep": [{"card": card}], "total": 1}
    await book.journal("cards").append("c-1", [Event(payload, tags={"seen"}, metadata={"card": card})])
    await book.queue("cards").put({"card": card}, key="k")


async def test_nothing_that_a_page_shows_depends_on_a_masked_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidebook.server.console.journal.SCAN_S_MAX", 60.0)
    shown = []
    for n, card in enumerate(("4111111111111111", "50000")):
        folder = tmp_path / str(n)
        folder.mkdir()
        (folder / "tidebook.toml").write_text('folder = "book"\n[mask]\n"cards.*.card" = "hide"\n')
        async with served(folder / "tidebook.toml") as (url, book), client(url) as http:
            await _masked(book, card)
            await book.settle()
            journal = {"topic": "cards", "id": "c-1"}
            found = [
                (await http.get("/journal.json", params={**journal, "where": each.format("4111111111111111")})).json()
                for each in ORACLES
            ]
            found += [
                (await http.get("/event.json", params={**journal, "number": 1, "form": form})).json()
                for form in ("tree", "text", "hex")
            ]
            found.append((await http.get("/tag.json", params={"tag": "seen"})).json()["events"])
            found.append((await http.get("/queue.json", params={"queue": "cards"})).json()["rows"])
            shown.append([_without_times(each) for each in found])
    assert shown[0] == shown[1]


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_times(v) for k, v in value.items() if not k.endswith("_ms") and k != "place"}
    return [_without_times(each) for each in value] if isinstance(value, list) else value


async def test_the_reason_of_a_dead_letter_does_not_show_or_find_masked_fields(
    tmp_path: Path, create_token: CreateToken
) -> None:
    (tmp_path / "tidebook.toml").write_text('folder = "book"\n[mask]\n"cards.*.card" = "hide"\n')
    viewer, operator = (await create_token("viewer")).token, (await create_token("operator")).token
    async with served(tmp_path / "tidebook.toml") as (url, book), client(url, viewer) as http:
        queue = book.queue("cards", settings=QueueSettings(max_timeouts=0))
        await queue.put({"card": "4111111111111111"})
        await queue.fail(await queue.claim(), reason="ValueError: 4111111111111111 is refused")
        dead = {"queue": "cards", "status": "dead"}
        for path, fields in (("/queue", dead), ("/entry", {**dead, "place": "1"})):
            shown = await http.get(path, params=fields)
            twin = await http.get(f"{path}.json", params=fields)
            assert "*** is refused" in shown.text
            assert "*** is refused" in twin.text
            assert "4111" not in shown.text + twin.text
        search = {"queue": "cards", "status": "dead", "reason": "4111"}
        assert (await http.get("/queue.json", params=search)).status_code == 403
        as_operator = {"authorization": f"Bearer {operator}"}
        assert len((await http.get("/queue.json", params=search, headers=as_operator)).json()["rows"]) == 1
        preview = await http.get("/acts/queues.retry", params={"queue": "cards", "places": "1"}, headers=as_operator)
        assert "*** is refused" in preview.text
        assert "4111" not in preview.text
