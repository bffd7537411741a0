"""The pages and acts of the console over HTTP: roles, masks, confirmations, JSON twins, and forms that are refused."""

from __future__ import annotations

import asyncio
import re
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.requests import Request

from tests.integration.server.conftest import CreateToken
from tests.integration.server.console_book import ACTS, ID, LIVES, PAGES, QUEUE, TAG, TOPIC, fill, filled
from tests.integration.server.running import client, live_rows, served
from tidebook import Book, Event
from tidebook.api.access import Role
from tidebook.api.errors import DeadlineExceeded
from tidebook.core.action import Mark
from tidebook.core.errors import NotFound, OutcomeUnknown, TidebookError
from tidebook.core.record import encode_record
from tidebook.log.port import Outgoing
from tidebook.queue.entry import Entry
from tidebook.queue.port import QueueSettings
from tidebook.queue.queue import Queue
from tidebook.server.audit_entry import AUDIT_TOPIC
from tidebook.server.console import queue_acts
from tidebook.server.console.act import Act, ActResult
from tidebook.server.console.catalog import CATALOG
from tidebook.server.console.console import late_error
from tidebook.server.console.form_fields import decode_fields, given_fields, parse_form
from tidebook.server.console.render import link, static_files
from tidebook.server.console.view import View
from tidebook.server.pipeline_jobs import PipelineJob

ROLES = (Role.VIEWER, Role.OPERATOR, Role.ADMIN)


def test_every_page_act_and_live_view_has_an_example() -> None:
    assert set(PAGES) == set(CATALOG.pages)
    assert set(ACTS) == set(CATALOG.acts)
    assert set(LIVES) == set(CATALOG.lives)


def test_static_files_are_small_and_have_their_licences() -> None:
    files = static_files()
    assert sum(len(body) for name, body in files.items() if name.endswith((".js", ".css"))) < 150_000
    assert {"htmx.LICENSE", "sse.LICENSE", "uplot.LICENSE"} <= set(files)


async def test_every_page_and_its_twin_answer(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        known = await fill(book)
        for name, fields in PAGES.items():
            page, query = CATALOG.pages[name], filled(fields, known)
            expected = 404 if name in ("job", "queue_act") else 200
            shown, twin = await http.get(page.path, params=query), await http.get(page.twin, params=query)
            assert (shown.status_code, twin.status_code) == (expected, expected), (name, shown.text, twin.text)
            assert shown.headers["content-type"].startswith("text/html")
            assert "json" in twin.headers["content-type"]
            assert "unsafe" not in shown.headers["content-security-policy"]
            assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=", shown.text), name
            assert "https://" not in shown.text


async def test_every_id_of_a_page_is_unique_and_every_label_refers_to_one(tmp_path: Path) -> None:
    (tmp_path / "tidebook.toml").write_text('folder = "book"\n[queue."to print"]\nmax_timeouts = 3\n')
    async with served(tmp_path / "tidebook.toml") as (url, book), client(url) as http:
        known = await fill(book)
        for name, fields in PAGES.items():
            text = (await http.get(CATALOG.pages[name].path, params=filled(fields, known))).text
            ids = re.findall(r'\sid="([^"]*)"', text)
            assert len(ids) == len(set(ids)), name
            assert {*" ".join(re.findall(r'aria-labelledby="([^"]*)"', text)).split()} <= {*ids}, name


async def test_a_method_that_a_page_does_not_have_is_refused_as_other_requests_are(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        refused = await http.post("/journals.json")
        assert (refused.status_code, refused.json()["type"]) == (405, "urn:tidebook:error:method-not-allowed")
        assert (refused.headers["allow"], refused.headers["cache-control"]) == ("GET", "no-store")
        assert "use GET" in (await http.put("/journals")).text


@pytest.mark.parametrize("name", CATALOG.pages)
def test_every_parameter_of_a_page_is_in_its_address(name: str) -> None:
    page = CATALOG.pages[name]
    given = dict(PAGES[name])
    for field in msgspec.structs.fields(page.query):
        for text in ("x", "2", "true", "0" * 16, "dead", "hex", "lag"):
            try:
                decoded = getattr(decode_fields(page.query, {**given, field.name: text}), field.name)
            except TidebookError:
                continue
            if field.required or decoded != field.default:
                given[field.name] = text
                break
    fields = decode_fields(page.query, given)
    assert set(given_fields(fields)) == set(page.query.__struct_fields__)
    shared = link(page.path, **given_fields(fields)).partition("?")[2]
    assert decode_fields(page.query, dict(parse_form(shared.encode()))) == fields


async def test_a_role_sees_and_does_only_what_its_routes_allow(tmp_path: Path, create_token: CreateToken) -> None:
    tokens = {role: (await create_token(role.label)).token for role in ROLES}
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        known = await fill(book)
        refused = 0
        for role in ROLES:
            headers = {"authorization": f"Bearer {tokens[role]}"}
            pages = [(each.path, PAGES[name], each.route.role) for name, each in CATALOG.pages.items()]
            pages += [(each.twin, PAGES[name], each.route.role) for name, each in CATALOG.pages.items()]
            pages += [(each.path, LIVES[name], each.route.role) for name, each in CATALOG.lives.items()]
            for path, fields, required in pages:
                if path.endswith("/live") and required <= role:
                    continue
                answer = await http.get(path, params=filled(fields, known), headers=headers)
                if required <= role:
                    assert answer.status_code in (200, 404), (path, role)
                    _check_links(answer, role)
                else:
                    assert answer.status_code == 403, (path, role)
            for name, act in CATALOG.acts.items():
                if act.route.role <= role:
                    continue
                fields = filled(ACTS[name], known)
                for answer in (
                    await http.get(act.path, params=fields, headers=headers),
                    await http.post(act.path, data=fields, headers=headers),
                ):
                    assert answer.status_code == 403, (name, role, answer.text)
                    refused += 1
        assert refused > 30
        assert len([event async for event in book.journal(TOPIC).read(ID)]) == 5
        assert len(await book.queue(QUEUE).dead_letters()) == 2


def _check_links(answer: httpx.Response, role: Role) -> None:
    """Check that a page links to no act or page that the role may not use."""
    required = {each.path: each.route.role for each in CATALOG.acts.values()}
    required |= {each.path: each.route.role for each in CATALOG.pages.values()}
    for path in re.findall(r'(?:href|action)="(/[^"?]*)', answer.text):
        assert required.get(path, Role.PUBLIC) <= role, (answer.url, path)


async def test_without_a_token_pages_lead_to_the_sign_in_and_nothing_is_shown(
    tmp_path: Path, create_token: CreateToken
) -> None:
    await create_token("admin")
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        known = await fill(book)
        for name, page in CATALOG.pages.items():
            if page.route.role is Role.PUBLIC:
                continue
            answer = await http.get(page.path, params=filled(PAGES[name], known))
            assert answer.status_code == 303, name
            assert answer.headers["location"].startswith("/sign-in?next=")
            assert (await http.get(page.twin)).status_code == 401
        for act in CATALOG.acts.values():
            if act.route.role is not Role.PUBLIC:
                assert (await http.post(act.path)).status_code == 401


async def test_a_prefix_limits_pages_and_acts(tmp_path: Path, create_token: CreateToken) -> None:
    token = (await create_token("admin", prefix="other-")).token
    async with served(tmp_path / "book") as (url, book), client(url, token) as http:
        known = await fill(book)
        for name, page in CATALOG.pages.items():
            answer = await http.get(page.path, params=filled(PAGES[name], known))
            if page.route.scope in ("topic", "queue", "namespace", "book"):
                assert answer.status_code == 403, name
            else:
                assert answer.status_code == 200, name
                for secret in ("orders", "mail", "metrics"):
                    assert f">{secret}" not in answer.text, (name, secret)
        for name, act in CATALOG.acts.items():
            if act.route.scope in ("topic", "queue", "namespace", "book"):
                assert (await http.post(act.path, data=filled(ACTS[name], known))).status_code == 403, name


async def test_a_token_with_a_prefix_sees_nothing_of_the_whole_book(tmp_path: Path, create_token: CreateToken) -> None:
    token = (await create_token("viewer", prefix="other-")).token
    async with served(tmp_path / "book") as (url, book), client(url, token) as http:
        await fill(book)
        seen = (await http.get("/overview.json")).json()
        assert (seen["findings"], seen["parts"], seen["numbers"]["topics"]) == ([], [], 0)
        text = (await http.get("/")).text
        assert "no process has reported" not in text
        assert "answers" not in text


async def test_only_an_admin_sees_the_topic_of_the_audit_and_no_act_on_it(
    tmp_path: Path, create_token: CreateToken
) -> None:
    tokens = {role: (await create_token(role.label)).token for role in (Role.OPERATOR, Role.ADMIN)}
    async with served(tmp_path / "book") as (url, book), client(url, tokens[Role.ADMIN]) as http:
        await fill(book)
        await http.delete(f"/v1/journals/{TOPIC}/{ID}")  # answered only after its audit entry is written
        chain = (await http.get("/audit.json")).json()["chain"]
        topics = [each["topic"] for each in (await http.get("/journals.json")).json()["topics"]]
        assert AUDIT_TOPIC in topics
        for path in (link("/topic", topic=AUDIT_TOPIC), link("/journal", topic=AUDIT_TOPIC, id=chain)):
            shown = await http.get(path)
            assert shown.status_code == 200
            assert "/acts/topics" not in shown.text
            assert "/acts/journals" not in shown.text
        async with client(url, tokens[Role.OPERATOR]) as other:
            assert AUDIT_TOPIC not in (await other.get("/journals")).text


async def test_a_part_of_a_page_leads_to_the_sign_in_when_the_session_has_ended(
    tmp_path: Path, create_token: CreateToken
) -> None:
    await create_token("admin")
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        part = await http.get("/journals?prefix=o", headers={"hx-request": "true"})
        assert (part.status_code, part.headers["hx-redirect"]) == (401, "/sign-in?next=%2Fjournals%3Fprefix%3Do")
        assert part.text == ""
        wrong = await http.post("/acts/access.sign_in", data={"token": "tb_x", "back": "/journals?prefix=o"})
        assert wrong.status_code == 401
        assert 'href="/sign-in?next=%2Fjournals%3Fprefix%3Do"' in wrong.text


async def test_a_form_of_a_signed_in_browser_needs_its_csrf_token(tmp_path: Path, create_token: CreateToken) -> None:
    token = (await create_token("admin")).token
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        signed_in = await http.post("/acts/access.sign_in", data={"token": token, "back": "//evil.example"})
        assert (signed_in.status_code, signed_in.headers["location"]) == (303, "/")
        form = {"topic": TOPIC, "id": ID, "payload": '{"by": "hand"}', "tags": "a, b", "back": "/journals"}
        assert (await http.post("/acts/journals.append", data=form)).status_code == 403
        page = (await http.get("/journal", params={"topic": TOPIC, "id": ID})).text
        csrf = re.search(r'name="csrf_token" value="([^"]+)"', page)
        assert csrf is not None
        done = await http.post("/acts/journals.append", data={**form, "csrf_token": csrf[1]})
        assert (done.status_code, done.headers["location"]) == (303, "/journal?topic=orders&id=o-1")
        events = [event async for event in book.journal(TOPIC).read(ID)]
        assert (events[-1].payload, events[-1].tags) == ({"by": "hand"}, frozenset({"a", "b"}))
        foreign = {"origin": "http://evil.example", "x-csrf-token": csrf[1]}
        assert (await http.post("/acts/journals.append", data=form, headers=foreign)).status_code == 403


async def confirmed(http: httpx.AsyncClient, act: str, **fields: str | int) -> dict[str, str]:
    """Return the form of a dry run, filled with the text that it requires."""
    asked = await http.get(f"/acts/{act}", params=fields)
    assert asked.status_code == 200, asked.text
    main = asked.text.partition("<main")[2]
    form = dict(re.findall(r'name="([^"]+)" value="([^"]*)"', main))
    word = re.search(r"Type <strong[^>]*>([^<]*)</strong>", main)
    return {**form, **({} if word is None else {"confirm": word[1]})}


DESTRUCTIVE = [each for each in CATALOG.acts.values() if each.route.destructive and each.name != "access.create_token"]


@pytest.mark.parametrize(("method", "kind"), [("POST", OutcomeUnknown), ("GET", DeadlineExceeded)])
def test_an_act_that_is_cancelled_at_its_deadline_may_have_happened(method: str, kind: type[TidebookError]) -> None:
    assert type(late_error(Request({"type": "http", "method": method}), 3.0)) is kind


@pytest.mark.parametrize("act", DESTRUCTIVE, ids=lambda act: act.name)
def test_every_destructive_act_has_a_dry_run(act: Act) -> None:
    assert act.preview is not None


async def test_an_act_runs_only_as_counted_and_with_the_typed_text(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        fields = {"topic": TOPIC, "id": ID, "to": "2"}
        assert "This deletes 2 events" in (await http.get("/acts/journals.delete", params=fields)).text
        form = await confirmed(http, "journals.delete", **fields)
        wrong = await http.post("/acts/journals.delete", data={**form, "confirm": "o"})
        assert wrong.status_code == 409
        assert "Nothing was done" in wrong.text
        for missing in ({"seal": ""}, {"seal": "0" * 32}, {"to": "3"}):
            stale = await http.post("/acts/journals.delete", data={**form, **missing})
            assert stale.status_code == 409
            assert "changed since it was counted" in stale.text
        assert await book.journal(TOPIC).pointer(ID) == 5
        assert len([event async for event in book.journal(TOPIC).read(ID)]) == 5
        done = await http.post("/acts/journals.delete", data=form)
        assert done.status_code == 303
        assert [event.seq_nr async for event in book.journal(TOPIC).read(ID)] == [3, 4, 5]
        again = await http.post("/acts/journals.delete", data=form)
        assert (again.status_code, "changed since it was counted" in again.text) == (409, True)


async def test_a_confirmation_does_not_cover_other_items_of_the_same_number(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        orders, queue = book.journal(TOPIC), book.queue(QUEUE)
        region = await book.wal("metrics").open_region(7)
        forms = {
            "journals.purge": await confirmed(http, "journals.purge", topic=TOPIC, id=ID),
            "journals.delete": await confirmed(http, "journals.delete", topic=TOPIC, id=ID, to=5),
            "queues.drop": await confirmed(http, "queues.drop", queue=QUEUE, status="dead"),
            "queues.retry": await confirmed(http, "queues.retry", queue=QUEUE, status="dead"),
            "queues.purge": await confirmed(http, "queues.purge", queue=QUEUE, status="later"),
            "wal.drop_table": await confirmed(http, "wal.drop_table", namespace="metrics", region=7, table=1),
            "wal.delete_region": await confirmed(http, "wal.delete_region", namespace="metrics", region=7),
        }
        await orders.purge(ID)
        await orders.append(ID, [Event(n) for n in range(5)])
        first, _ = await queue.dead_letters()
        await queue.drop(first.id)
        await queue.fail(await queue.claim(1, 600, together=False), reason="smtp 550")
        await queue.put({"to": "another"}, key="later-2", process_at=4_000_000_000_001)
        later = (await http.get(link("/queue.json", queue=QUEUE, status="later"))).json()["rows"]
        purge = await confirmed(http, "queues.purge", queue=QUEUE, status="later", places=later[0]["place"])
        assert (await http.post("/acts/queues.purge", data=purge)).status_code == 303
        await region.mark_deleted(1, 3)
        await region.write(1, [b"c", b"d"])
        for name, form in forms.items():
            refused = await http.post(f"/acts/{name}", data=form)
            assert (refused.status_code, "changed since it was counted" in refused.text) == (409, True), name
        assert [event.payload async for event in orders.read(ID)] == list(range(5))
        assert len(await queue.dead_letters()) == 2
        assert [row["key"] for row in later] == ["later", "later-2"]


async def test_marks_that_arrive_after_the_dry_run_do_not_keep_a_topic_from_being_deleted(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        mark = encode_record(Mark(1), limit_bytes=1_000)
        stale = await confirmed(http, "topics.delete", topic=TOPIC)
        await book.journal(TOPIC).append("another", [Event(1)])
        refused = await http.post("/acts/topics.delete", data=stale)
        assert (refused.status_code, "changed since it was counted" in refused.text) == (409, True)
        form = await confirmed(http, "topics.delete", topic=TOPIC)
        for partition in range((await book.describe_topic(TOPIC)).partitions):
            await book.log.append(Outgoing(TOPIC, partition, None, mark))
        assert (await http.post("/acts/topics.delete", data={**form, "ends": "0,0"})).status_code == 409
        assert (await http.post("/acts/topics.delete", data=form)).status_code == 303
        assert TOPIC not in await book.topics()


async def test_more_rows_than_a_page_can_select_are_refused_and_not_cut(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        known = await fill(book)
        many = ",".join([str(known["letter"])] * 1_001)
        for name, status in (("queues.drop", "dead"), ("queues.retry", "dead"), ("queues.purge", "due")):
            answer = await http.get(f"/acts/{name}", params={"queue": QUEUE, "status": status, "places": many})
            assert (answer.status_code, "1,001 rows are selected" in answer.text) == (400, True), name


async def test_entries_that_become_due_after_the_dry_run_are_neither_counted_nor_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More entries than this are deleted page by page, without a list of their positions.
    monkeypatch.setattr(queue_acts, "AT_ONCE_MAX", 5)
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        queue = book.queue("busy")
        await queue.put_many(list(range(10)))
        form = await confirmed(http, "queues.purge", queue="busy", status="due")
        later_ms = int(form["as_of"]) + 1
        await queue.put_many([Entry(data=n, process_at=later_ms) for n in range(10, 15)])
        started = await http.post("/acts/queues.purge", data=form)
        await _ended(http, started.headers["location"])
        assert [each.data for each in await queue.entries()] == list(range(10, 15))


async def _ended(http: httpx.AsyncClient, location: str) -> dict[str, Any]:
    """Wait for the end of an act that runs in the background; return the data of its page."""
    assert location.startswith("/queue-act?")
    async with asyncio.timeout(60):
        while (seen := (await http.get(location.replace("?", ".json?", 1))).json())["state"] == "running":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return dict(seen)


async def test_an_act_on_many_entries_runs_in_the_background_and_is_audited_twice(
    tmp_path: Path, create_token: CreateToken
) -> None:
    root, stranger = [(await create_token("admin", prefix=prefix)).token for prefix in ("", "other-")]
    viewer = (await create_token("viewer")).token
    async with served(tmp_path / "book") as (url, book), client(url, root) as http:
        queue = book.queue("big", settings=QueueSettings(max_timeouts=0))
        await queue.put_many(list(range(2_500)))
        await queue.fail(await queue.claim(2_500), reason="no")
        form = await confirmed(http, "queues.drop", queue="big", status="dead")
        started = await http.post("/acts/queues.drop", data=form)
        where = started.headers["location"]
        assert where.startswith("/queue-act?")
        async with client(url, stranger) as other:
            assert (await other.get(where)).status_code == 403
            assert (await other.get(where.replace("big", "other-1"))).status_code == 404
        async with client(url, viewer) as looking:
            cancel = {"queue": "big", "act": where.rpartition("=")[2]}
            assert (await looking.post("/acts/queues.cancel_act", data=cancel)).status_code == 403
            assert (await looking.post("/acts/queues.drop", data=form)).status_code == 403
            assert "queues.cancel_act" not in (await looking.get(where)).text
        seen = await _ended(http, where)
        assert (seen["state"], seen["changed"], seen["total"]) == ("done", 2_500, 2_500)
        assert await queue.dead_letters() == []
        done = [each for each in (await http.get("/audit.json")).json()["entries"] if "queues.drop" in str(each)]
        assert len(done) == 2, done
        assert "changed=2500" in str(done)


async def test_an_act_or_a_job_that_has_ended_is_not_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_acts, "AT_ONCE_MAX", 1)

    async def end(self: PipelineJob, command: list[str]) -> None:
        self.state = "done"

    monkeypatch.setattr(PipelineJob, "run", end)
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        form = await confirmed(http, "queues.retry", queue=QUEUE, status="dead")
        started = await http.post("/acts/queues.retry", data=form)
        seen = await _ended(http, started.headers["location"])
        form = await confirmed(http, "pipeline.start", kind="verify", topics=TOPIC)
        job = (await http.post("/acts/pipeline.start", data=form)).headers["location"].rpartition("=")[2]
        for name, fields in (
            ("queues.cancel_act", {"queue": QUEUE, "act": seen["id"]}),
            ("pipeline.cancel", {"job": job}),
        ):
            answer = await http.post(f"/acts/{name}", data=fields)
            assert (answer.status_code, "had ended already" in (await http.get("/tags")).text) == (303, True), name
        await http.delete(f"/v1/journals/{TOPIC}/{ID}")  # answered only after earlier audit entries are written
        assert "cancel" not in str((await http.get("/audit.json")).json()["entries"])


async def test_an_act_affects_no_more_items_than_were_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def add(book: Book) -> None:
        await book.queue("busy").put_many(list(range(5)))
        await book.journal(TOPIC).append(ID, [Event("new")])

    for name in ("queues.purge", "journals.delete"):
        act = CATALOG.acts[name]

        async def run(view: View, act: Act = act) -> ActResult:
            await add(view.book)  # after the count was checked
            return await act.run(view)

        monkeypatch.setitem(CATALOG.acts, name, msgspec.structs.replace(act, run=run))
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        queue, orders = book.queue("busy"), book.journal(TOPIC)
        await queue.put_many(list(range(10)))
        form = await confirmed(http, "queues.purge", queue="busy", status="due")
        assert (await http.post("/acts/queues.purge", data=form)).status_code == 303
        assert [each.data for each in await queue.entries()] == list(range(5))
        form = await confirmed(http, "journals.delete", topic=TOPIC, id=ID, to=100)
        assert (await http.post("/acts/journals.delete", data=form)).status_code == 303
        assert [event.payload async for event in orders.read(ID)] == ["new"]


@pytest.mark.parametrize(
    ("fields", "is_asked"),
    [({"kind": "verify", "repair": "true"}, True), ({"kind": "rebuild"}, True), ({"kind": "verify"}, False)],
)
async def test_a_job_that_changes_the_store_asks_to_stop_replication(
    tmp_path: Path, fields: dict[str, str], is_asked: bool
) -> None:
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        dry_run = await http.get("/acts/pipeline.start", params={**fields, "topics": TOPIC})
        assert (dry_run.status_code, "Stop replication first" in dry_run.text) == (200, is_asked)


async def test_deleting_events_of_a_journal_that_does_not_exist_does_not_create_it(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        form = await confirmed(http, "journals.delete", topic=TOPIC, id="none", to=7)
        done = await http.post("/acts/journals.delete", data=form)
        assert "There was no event to delete." in (await http.get(done.headers["location"])).text
        assert await book.journal(TOPIC).pointer("none") is None


async def test_an_entry_that_became_due_since_it_was_listed_is_shown_and_deleted_as_due(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await book.queue(QUEUE).put({"n": 1})
        (row,) = (await http.get(link("/queue.json", queue=QUEUE))).json()["rows"]
        listed = {"queue": QUEUE, "status": "later", "place": row["place"]}
        assert (await http.get("/entry.json", params=listed)).json()["status"] == "due"
        (address,) = re.findall(r'href="(/acts/queues.purge[^"]*)"', (await http.get("/entry", params=listed)).text)
        assert "This deletes 1 waiting entry" in (await http.get(unescape(address))).text


async def test_a_filter_that_does_not_apply_is_refused_and_not_left_out(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        for fields in (
            {"status": "dead", "priority": "1"},
            {"status": "dead", "after": "2026-01-01"},
            {"status": "dead", "until": "2026-01-01"},
            {"status": "due", "reason": "smtp"},
        ):
            refused = await http.get("/queue", params={"queue": QUEUE, **fields})
            assert (refused.status_code, "leave" in refused.text) == (400, True), fields
            name = "queues.drop" if fields["status"] == "dead" else "queues.purge"
            assert (await http.get(f"/acts/{name}", params={"queue": QUEUE, **fields})).status_code == 400, fields


async def test_an_invalid_worker_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        for worker in ("x", "0" * 15, "0" * 16 + "'", "<script>"):
            answer = await http.get("/queue", params={"queue": QUEUE, "status": "processing", "worker": worker})
            assert answer.status_code == 400, worker
        answer = await http.get("/queue", params={"queue": QUEUE, "status": "due", "worker": "0" * 16})
        assert answer.status_code == 400
        answer = await http.put(f"/v1/queues/{QUEUE}/workers/{'0' * 32}", json={"name": "a\0b"})
        assert answer.status_code == 400
        name = "<img src=x onerror=alert(1)>"
        assert (await http.put(f"/v1/queues/{QUEUE}/workers/{'0' * 32}", json={"name": name})).status_code == 204
        page = (await http.get("/queue", params={"queue": QUEUE})).text
        assert name not in page
        assert "&lt;img src=x" in page


async def test_acts_are_audited_as_the_routes_of_the_api_are(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await fill(book)
        form = await confirmed(http, "queues.retry", queue=QUEUE, status="dead")
        assert (await http.post("/acts/queues.retry", data=form)).status_code == 303
        form = await confirmed(http, "journals.purge", topic=TOPIC, id=ID)
        assert (await http.post("/acts/journals.purge", data=form)).status_code == 303
        entries = (await http.get("/audit.json")).json()["entries"]
        found = [(each["action"], each["target"]) for each in entries if each["action"] != "server.start"]
        assert found == [
            ("journals.purge", "/acts/journals.purge?topic=orders&id=o-1"),
            ("queues.retry", "/acts/queues.retry?queue=mail"),
        ]
        checked = (await http.get("/audit.json?check=true")).json()["check"]
        assert checked["findings"] == []


async def test_the_audit_has_no_payload_of_an_act(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        known = await fill(book)
        for name, fields in ACTS.items():
            act = CATALOG.acts[name]
            if act.content:
                form = {**filled(fields, known), **dict.fromkeys(act.content, '{"card": "no hex digits"}')}
                assert (await http.post(act.path, data=form)).status_code == 303, name
        await http.delete(f"/v1/journals/{TOPIC}/{ID}")  # answered only after earlier audit entries are written
        entries = (await http.get("/audit.json")).json()["entries"]
        assert {"journals.append", "queues.put", "queues.edit"} < {each["action"] for each in entries}
        assert "no hex digits" not in str(entries)


async def test_the_replaced_data_of_a_dead_letter_is_audited_even_if_the_retry_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: Queue, flag: int) -> None:
        raise NotFound("it was retried meanwhile")

    monkeypatch.setattr(Queue, "retry", refuse)
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        known = await fill(book)
        form = {"queue": QUEUE, "letter": str(known["letter"]), "data": '"other"', "retry": "true"}
        assert (await http.post("/acts/queues.edit", data=form)).status_code == 303
        await http.delete(f"/v1/journals/{TOPIC}/{ID}")  # answered only after earlier audit entries are written
        assert "queues.edit" in {each["action"] for each in (await http.get("/audit.json")).json()["entries"]}


async def test_a_new_token_is_shown_once_and_not_in_the_audit(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, _), client(url) as http:
        made = await http.post("/acts/access.create_token", data={"name": "ops", "role": "admin"})
        secret = re.search(r"tb_[\w-]+", made.text)
        assert secret is not None
        headers = {"authorization": f"Bearer {secret[0]}"}
        for path in ("/tokens", "/tokens.json", "/audit", "/audit.json"):
            answer = await http.get(path, headers=headers)
            assert answer.status_code == 200
            assert secret[0] not in answer.text


async def _masked_book(book: Book) -> None:
    await book.journal("cards").append("c-1", [Event({"card": "4111111111111111", "total": 5}, tags={"seen"})])
    queue = book.queue("cards")
    await queue.put({"card": "4111111111111111"}, key="k")


async def test_masked_fields_stay_masked_on_every_page_and_in_filters(
    tmp_path: Path, create_token: CreateToken
) -> None:
    folder = tmp_path / "book"
    (tmp_path / "tidebook.toml").write_text('folder = "book"\n[mask]\n"cards.*.card" = "hide"\n')
    viewer, admin = (await create_token("viewer")).token, (await create_token("admin")).token
    assert folder.exists()
    async with served(tmp_path / "tidebook.toml") as (url, book), client(url, viewer) as http:
        await _masked_book(book)
        place = (await http.get("/queue.json?queue=cards")).json()["rows"][0]["place"]
        journal = {"topic": "cards", "id": "c-1"}
        addresses = [
            link("/journal", **journal),
            link("/journal", where='payload.card contains "4111"', **journal),
            *(link("/event", number=1, form=form, **journal) for form in ("tree", "text", "hex")),
            link("/tag", tag="seen"),
            link("/queue", queue="cards"),
            link("/entry", queue="cards", status="due", place=place),
        ]
        unmaskable = {page.path for page in CATALOG.pages.values() if "unmask" in page.query.__struct_fields__}
        assert unmaskable == {address.partition("?")[0] for address in addresses}
        hidden = [b"4111111111111111", b"4111111111111111".hex(" ").encode()]
        for address in addresses:
            for shown in (address, address.replace("?", ".json?", 1)):
                answer = await http.get(shown)
                assert answer.status_code == 200, (shown, answer.text)
                assert not any(each in answer.content for each in hidden), shown
        found = (await http.get(link("/journal.json", where='payload.card contains "4111"', **journal))).json()
        assert found["events"] == []
        assert (await http.get(link("/journal", unmask=True, **journal))).status_code == 403
        as_admin = {"authorization": f"Bearer {admin}"}
        unmasked = await http.get(link("/journal", unmask=True, **journal), headers=as_admin)
        assert b"4111111111111111" in unmasked.content
        entries = (await http.get("/audit.json", headers=as_admin)).json()["entries"]
        assert [(each["who"], each["unmask"]) for each in entries if each["unmask"]] == [("admin", True)]


async def test_a_search_continues_where_its_budget_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidebook.server.console.journal.SCAN_EVENTS_MAX", 40)
    monkeypatch.setattr("tidebook.server.console.journal.SCAN_S_MAX", 60.0)
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await book.journal(TOPIC).append("long", [Event({"n": n}) for n in range(100)])
        fields = {"topic": TOPIC, "id": "long", "where": "payload.n >= 70 and payload.n < 90"}
        numbers, steps, at = list[int](), 0, None
        while True:
            answer = (await http.get("/journal.json", params={**fields, **({} if at is None else {"at": at})})).json()
            numbers += [event["number"] for event in answer["events"]]
            steps, at = steps + 1, answer["scan"]["next"]
            if answer["scan"]["done"]:
                break
        assert (numbers, steps) == (list(range(71, 91)), 3)


async def test_a_search_continues_even_if_reading_takes_longer_than_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidebook.server.console.journal.SCAN_S_MAX", 0.0)
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await book.journal(TOPIC).append("slow", [Event({"n": n}) for n in range(5)])
        at, seen = 1, list[int]()
        for _ in range(5):
            fields: dict[str, str | int] = {"topic": TOPIC, "id": "slow", "where": "payload.n >= 0", "at": at}
            answer = (await http.get("/journal.json", params=fields)).json()
            seen += [event["number"] for event in answer["events"]]
            at = answer["scan"]["next"] or at
        assert seen[:5] == [1, 2, 3, 4, 5]


async def test_pages_of_a_journal_with_skipped_numbers_are_full_and_lead_to_its_beginning(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        journal = book.journal(TOPIC)
        await journal.append("sparse", [Event(n) for n in range(70)])
        for n in range(1, 61):
            await journal.append("sparse", [Event(n)], at=n * 1_000)
        await journal.append("sparse", [Event("far")], at=2**40)

        async def page(**seek: int | None) -> tuple[list[int], int | None]:
            found = (await http.get(link("/journal.json", topic=TOPIC, id="sparse", **seek))).json()
            return [event["number"] for event in found["events"]], found["previous"]

        last, at = await page()
        assert last == [*(n * 1_000 for n in range(12, 61)), 2**40]
        second, at = await page(at=at)
        assert second == [*range(32, 71), *(n * 1_000 for n in range(1, 12))]
        first, _ = await page(at=at)
        assert (first[:31], (await page(at=1))[1]) == (list(range(1, 32)), None)
        beyond, at = await page(at=2**41)
        assert (beyond, (await page(at=at))[0]) == ([], last)
        await journal.append("begins-late", [Event(1)], at=500)
        assert (await http.get(link("/journal.json", topic=TOPIC, id="begins-late"))).json()["previous"] is None


async def test_a_journal_is_opened_at_a_number_an_offset_or_a_time(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        journal = book.journal(TOPIC)
        for n in range(1, 31):
            await journal.append(ID, [Event(n)], at=n * 10)
        events = [event async for event in journal.read(ID)]
        wanted = events[17]

        async def first(**seek: object) -> int:
            answer = await http.get(link("/journal.json", topic=TOPIC, id=ID, **seek))
            return int(answer.json()["events"][0]["number"])

        assert await first(at=171) == 180
        assert await first(offset=wanted.offset) == wanted.seq_nr
        at = await first(time=wanted.timestamp.isoformat())
        assert next(each for each in events if each.seq_nr == at).timestamp_ms == wanted.timestamp_ms
        both = await http.get(link("/journal", topic=TOPIC, id=ID, at=1, offset=1))
        assert both.status_code == 400


async def test_a_live_view_that_reconnects_shows_all_of_the_next_incarnation(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        orders = book.journal(TOPIC)
        await orders.append(ID, [Event(f"old {n}") for n in range(3)])
        live, journal = CATALOG.lives["journal.live"].path, LIVES["journal.live"]
        last, row = (await live_rows(http, live, journal, 3))[-1]
        assert "old 2" in row
        await orders.purge(ID)
        await orders.append(ID, [Event(f"new {n}") for n in range(2)])
        rows = await live_rows(http, live, journal, 2, after=last)
        assert [f"new {n}" in row for n, (_, row) in enumerate(rows)] == [True, True]
        refused = await http.get(live, params={**journal, "id": "o-2"}, headers={"last-event-id": last})
        assert refused.status_code == 400


async def test_a_live_view_beyond_the_limit_of_streams_is_refused_like_a_stream_of_the_api(tmp_path: Path) -> None:
    (tmp_path / "tidebook.toml").write_text('folder = "book"\n[server]\nstreams_per_token_max = 1\n')
    async with served(tmp_path / "tidebook.toml") as (url, book), client(url) as http:
        await fill(book)
        live, fields = CATALOG.lives["journal.live"].path, LIVES["journal.live"]
        async with http.stream("GET", live, params=fields) as stream:
            assert stream.status_code == 200
            refused = await http.get(live, params=fields)
            assert (refused.status_code, refused.headers["cache-control"]) == (429, "no-store")
            assert "default-src 'none'" in refused.headers["content-security-policy"]
            assert "too many open streams" in refused.json()["detail"]


async def test_the_previous_event_is_found_across_skipped_numbers(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        journal, numbers = book.journal(TOPIC), [3, 4, 10, 1_000, 2**40]
        for number in numbers:
            await journal.append(ID, [Event(number)], at=number)

        async def previous(number: int) -> int | None:
            found = (await http.get(link("/event.json", topic=TOPIC, id=ID, number=number))).json()["previous"]
            return None if found is None else int(found)

        assert [await previous(each) for each in numbers] == [None, *numbers[:-1]]
        await journal.delete(ID, to=4)
        assert await previous(10) is None


@pytest.mark.parametrize("topics_read_max", [0, 500])
async def test_a_tag_shows_its_stream_page_by_page_and_its_consumer_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topics_read_max: int
) -> None:
    monkeypatch.setattr("tidebook.server.console.tags.TOPICS_READ_MAX", topics_read_max)
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await book.journal(TOPIC).append(ID, [Event(n, tags={TAG}) for n in range(60)])
        await book.settle()
        async with book.tags.subscribe(TAG, "mailers/eu", follow=False) as events:
            async for event in events:
                await events.commit(event)
        first = (await http.get(link("/tag.json", tag=TAG))).json()
        rest = (await http.get(link("/tag.json", tag=TAG, after=first["next"]))).json()
        assert [each["number"] for each in first["events"] + rest["events"]] == list(range(1, 61))
        assert (rest["next"], rest["gaps"]) == (None, [])
        (group,) = rest["groups"]
        assert (group["group"], group["tag"], group["members"], group["owned"]) == ("mailers/eu", TAG, {}, 0)
        assert group["lag_s"] is not None
        assert (await http.get("/tags.json")).json()["groups"] == [group]
        assert (await http.get(link("/tag.json", tag="other"))).json()["groups"] == []
        assert first["horizon"]["topic"] == TOPIC


async def test_settings_show_their_effective_values_and_sources(tmp_path: Path) -> None:
    (tmp_path / "tidebook.toml").write_text('folder = "book"\n[journal]\npage_events = 7\n')
    async with served(tmp_path / "tidebook.toml") as (url, _), client(url) as http:
        sections = {each["name"]: each for each in (await http.get("/settings.json")).json()["sections"]}
        rows = {each["name"]: each for each in sections["journal"]["rows"]}
        assert (rows["page_events"]["value"], rows["page_events"]["is_default"]) == ("7", False)
        assert rows["page_events"]["origin"] == f"{tmp_path / 'tidebook.toml'}, line 3"
        assert (rows["partitions"]["origin"], rows["partitions"]["is_default"]) == ("default", True)
