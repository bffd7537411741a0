"""The audit: which changes are recorded, and that tampering is detected."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tidebook
from tests.integration.server.conftest import CreateToken
from tests.integration.server.running import client, served, served_book
from tidebook import Event
from tidebook.server.audit_check import AuditFinding, check_audit
from tidebook.server.audit_entry import GENESIS, AuditEntry, encode_group
from tidebook.server.database import ServerDatabase

PATH = "/v1/journals/orders/o-1"
Entries = list[dict[str, Any]]


async def serve_some_changes(folder: Path, token: str | None = None) -> tuple[str, Entries]:
    """Serve a few changes; return the chain's id and its entries."""
    async with served(folder) as (url, _), client(url, token) as http:
        for n in range(3):
            await http.post(f"{PATH}/events", json={"events": [{"payload": n}]})
        assert (await http.delete(PATH)).status_code == 204
        await http.get(f"{PATH}/events")
    async with tidebook.open(folder) as book:
        audit = book.journal("tidebook-audit")
        ids = sorted([id async for id in audit.ids()])
        return ids[-1], [event.payload async for event in audit.read(ids[-1])]


async def test_changes_are_recorded_with_principal_and_action(tmp_path: Path, create_token: CreateToken) -> None:
    made = await create_token("admin")
    _, entries = await serve_some_changes(tmp_path / "book", made.token)
    assert [each["action"] for each in entries] == [
        "server.start", *["journals.append"] * 3, "journals.purge", "server.stop",
    ]  # fmt: skip
    assert [each["n"] for each in entries] == [1, 2, 3, 4, 5, 6]
    purge = entries[4]
    assert (purge["who"], purge["token"], purge["role"]) == ("admin", made.id, "admin")
    assert (purge["target"], purge["status"], purge["client"]) == (PATH, 204, "127.0.0.1")
    assert made.token not in str(entries)


async def test_a_purge_is_recorded_before_it_is_answered(tmp_path: Path) -> None:
    async with served(tmp_path / "book") as (url, book), client(url) as http:
        await http.delete(PATH)
        audit = book.journal("tidebook-audit")
        [chain] = [id async for id in audit.ids()]
        assert [e.payload["action"] async for e in audit.read(chain)] == ["server.start", "journals.purge"]


async def actions_of(book: tidebook.Book) -> list[tuple[str, int]]:
    """Return the actions and statuses in the audit, without the start and the end of a server."""
    audit = book.journal("tidebook-audit")
    entries = [event.payload async for id in audit.ids() async for event in audit.read(id)]
    return [(each["action"], each["status"]) for each in entries if not each["action"].startswith("server.")]


@pytest.mark.parametrize("is_keyed", [False, True])
async def test_a_claim_without_a_job_and_the_report_of_a_worker_are_not_recorded(
    tmp_path: Path, is_keyed: bool
) -> None:
    async with tidebook.open(tmp_path / "book", create=True) as book:
        async with served_book(book) as url, client(url) as http:
            claims, worker = "/v1/queues/mail/claims", f"/v1/queues/mail/workers/{'0' * 32}"
            for n, (method, path, body, status) in enumerate(
                [("POST", claims, {}, 200), ("PUT", worker, {"name": "w"}, 204), ("DELETE", worker, None, 204)]
            ):
                headers = {"idempotency-key": str(n)} if is_keyed else {}
                answer = await http.request(method, path, json=body, headers=headers)
                assert answer.status_code == status
            await http.post("/v1/queues/mail/pause")
        assert await actions_of(book) == [("queues.pause", 204)]


@pytest.mark.parametrize("action", ["done", "failures", "heartbeats", "claims"])
async def test_a_change_of_several_jobs_is_recorded_even_if_a_lease_was_lost(tmp_path: Path, action: str) -> None:
    async with tidebook.open(tmp_path / "book", create=True) as book:
        async with served_book(book) as url, client(url) as http:
            await book.queue("mail").put_many([1, 2, 3])
            jobs = (await http.post("/v1/queues/mail/claims", json={"limit": 3})).json()["jobs"]
            leases = [each["lease"] for each in jobs]
            assert (await http.post("/v1/queues/mail/done", json={"leases": leases[:1]})).status_code == 204
            name = "done" if action == "claims" else "leases"
            refused = await http.post(f"/v1/queues/mail/{action}", json={name: leases})
            assert refused.json()["type"] == "urn:tidebook:error:lease-lost"
            lost = await http.post(f"/v1/queues/mail/{action}", json={name: leases[:1]})
            assert lost.status_code == 409
        route = {"failures": "fail", "heartbeats": "heartbeat", "claims": "claim"}.get(action, action)
        assert await actions_of(book) == [("queues.claim", 200), ("queues.done", 204), (f"queues.{route}", 409)]


async def test_more_entries_than_fit_in_a_record_are_written(tmp_path: Path) -> None:
    file = tmp_path / "tidebook.toml"
    file.write_text('folder = "book"\n[journal]\nlimit_bytes = 2000\n')
    async with tidebook.open(file, create=True) as book:
        async with served_book(book) as url, client(url) as http:
            appends = [http.post(f"{PATH}/events", json={"events": [{"payload": n}]}) for n in range(40)]
            assert {each.status_code for each in await asyncio.gather(*appends)} == {200}
            assert (await http.delete(PATH, headers={"request-timeout": "5"})).status_code == 204
        assert await actions_of(book) == [*[("journals.append", 200)] * 40, ("journals.purge", 204)]
    assert await findings_of(tmp_path / "book") == []


async def findings_of(folder: Path) -> list[AuditFinding]:
    database = ServerDatabase(folder)
    try:
        async with tidebook.open(folder) as book:
            return (await check_audit(book, database)).findings
    finally:
        await database.close()


async def test_an_untouched_audit_has_no_findings_over_restarts(tmp_path: Path) -> None:
    await serve_some_changes(tmp_path / "book")
    _, entries = await serve_some_changes(tmp_path / "book")
    assert len(entries[0]["detail"]["previous"]) == 1
    assert await findings_of(tmp_path / "book") == []
    command = [sys.executable, "-m", "tidebook.cli", "audit", "verify", "--book", str(tmp_path / "book"), "--json"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, '{"chains":2,"entries":12,"findings":0}\n')


def changed(entries: Entries) -> Entries:
    return [*entries[:2], {**entries[2], "who": "somebody else"}, *entries[3:]]


def changed_with_its_hash(entries: Entries) -> Entries:
    end = next(index for index, each in enumerate(entries) if "hash" in each and index >= 2)
    group = msgspec.convert([{**each, "hash": ""} for each in changed(entries)[: end + 1]], list[AuditEntry])
    forged, _ = encode_group(group, GENESIS)
    return [*map(msgspec.json.decode, forged), *entries[end + 1 :]]


def without_hash(entries: Entries) -> Entries:
    return [{name: value for name, value in each.items() if name != "hash"} for each in entries]


def extended(entries: Entries) -> Entries:
    return [*entries[:2], {**entries[2], "approved": "by somebody else"}, *entries[3:]]


def removed(entries: Entries) -> Entries:
    return [*entries[:2], *entries[3:]]


def first_removed(entries: Entries) -> Entries:
    return entries[1:]


def last_removed(entries: Entries) -> Entries:
    return entries[:-1]


def reordered(entries: Entries) -> Entries:
    return [entries[0], entries[2], entries[1], *entries[3:]]


def repeated(entries: Entries) -> Entries:
    return [*entries[:3], entries[2], *entries[3:]]


def foreign(entries: Entries) -> Entries:
    return [*entries, {"hello": 1}]


@pytest.mark.parametrize(
    ("tamper", "what"),
    [
        (changed, "changed"),
        (changed_with_its_hash, "changed"),
        (without_hash, "changed"),
        (extended, "foreign"),
        (removed, "removed"),
        (first_removed, "removed"),
        (last_removed, "removed"),
        (reordered, "reordered"),
        (repeated, "repeated"),
        (foreign, "foreign"),
    ],
)
async def test_tampering_is_detected(tmp_path: Path, tamper: Any, what: str) -> None:
    chain, entries = await serve_some_changes(tmp_path / "book")
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in (tmp_path / "book").glob("server.db*"):
        shutil.copy(file, copy)
    async with tidebook.open(copy) as book:
        await book.journal("tidebook-audit").append(chain, [Event(each) for each in tamper(entries)])
    assert what in {each.what for each in await findings_of(copy)}


async def test_a_removed_chain_is_detected(tmp_path: Path) -> None:
    chain, _ = await serve_some_changes(tmp_path / "book")
    async with tidebook.open(tmp_path / "book") as book:
        await book.journal("tidebook-audit").purge(chain)
    assert [each.what for each in await findings_of(tmp_path / "book")] == ["removed"]
