"""The audit: who changed what, chain by chain, and the check of the chains."""

from __future__ import annotations

from contextlib import aclosing
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from tidebook.api.access import AuditVerifyResponse
from tidebook.server.audit_check import check_audit
from tidebook.server.audit_entry import AUDIT_TOPIC, AuditEntry
from tidebook.server.console.journal import read_page
from tidebook.server.console.page import Page
from tidebook.server.console.routes import AUDIT_PAGE
from tidebook.server.console.view import View

ROWS_MAX: Final = 50
CHAINS_MAX: Final = 100
#: How many ids of the store are searched for chains of other servers.
SCAN_MAX: Final = 1_000


class AuditQuery(msgspec.Struct, frozen=True):
    """A chain, the newest by default, and where its page begins; with `check`, all chains are checked."""

    chain: str | None = None
    at: Annotated[int, Meta(ge=1)] | None = None
    check: bool = False


class AuditRow(AuditEntry, frozen=True, omit_defaults=False):
    """An entry with all its fields, for the JSON form of the page; stored entries leave out empty ones."""


class AuditData(msgspec.Struct, frozen=True, kw_only=True):
    chains: list[str]
    chain: str | None
    entries: list[AuditRow]
    #: Events of the chain that are not entries of the audit.
    foreign: int
    previous: int | None
    next: int | None
    check: AuditVerifyResponse | None


async def audit(view: View) -> AuditData:
    """Show entries of a chain, newest first."""
    query, journal = view.fields, view.book.journal(AUDIT_TOPIC)
    chains = await _chains(view)
    chain = query.chain or (chains[0] if chains else None)
    head = None if chain is None else await journal.head(chain, barrier="offset")
    entries, foreign, start, more = list[AuditRow](), 0, 1, False
    if chain is not None and head is not None:
        start = query.at or max(1, head.seq_nr - ROWS_MAX + 1)
        events, more = await read_page(journal, chain, start, head, ROWS_MAX)
        for event in events:
            try:
                entries.append(msgspec.convert(event.payload, AuditRow))
            except msgspec.ValidationError:
                foreign += 1
    check = None
    if query.check:
        report = await check_audit(view.book, view.state.database)
        findings = [msgspec.structs.asdict(each) for each in report.findings]
        check = AuditVerifyResponse(chains=report.chains, entries=report.entries, findings=findings)
    return AuditData(
        chains=chains,
        chain=chain,
        entries=entries[::-1],
        foreign=foreign,
        previous=max(1, start - ROWS_MAX) if start > 1 else None,
        next=start + ROWS_MAX if more else None,
        check=check,
    )


async def _chains(view: View) -> list[str]:
    """Return the chains, newest first: those that this server recorded, and those that the store has."""
    rows = view.state.database.select("SELECT id FROM chain ORDER BY id DESC LIMIT ?", (CHAINS_MAX,))
    found = {id for (id,) in rows} | ({view.state.audit.chain} if view.state.audit.chain else set())
    scanned = 0
    async with aclosing(view.book.store.ids(AUDIT_TOPIC)) as ids:  # type: ignore[type-var]
        async for id in ids:
            found.add(id)
            scanned += 1
            if scanned >= SCAN_MAX:
                break
    return sorted(found, reverse=True)[:CHAINS_MAX]


PAGES = (Page("audit", AUDIT_PAGE, audit, AuditQuery),)
