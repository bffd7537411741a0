"""Check the chains of the audit: find entries that were changed, removed, repeated, reordered or written by others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final, Literal

import msgspec

from tidebook.core.errors import TidebookError
from tidebook.server.audit_entry import AUDIT_TOPIC, GENESIS, AuditEntry, GroupHash
from tidebook.server.database import ServerDatabase
from tidebook.wiring.book import Book

FINDINGS_MAX: Final = 1_000
What = Literal["changed", "removed", "repeated", "reordered", "foreign", "damaged"]


class AuditFinding(msgspec.Struct, frozen=True):
    """One deviation of a chain."""

    chain: str
    #: The number of the entry; of a group whose hash differs, that of its first entry.
    n: int
    what: What
    detail: str


class AuditReport(msgspec.Struct):
    """The result of a check."""

    chains: int = 0
    entries: int = 0
    findings: list[AuditFinding] = []

    def add(self, chain: str, n: int, what: What, detail: str) -> None:
        """Add a finding, up to a bound."""
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(AuditFinding(chain, n, what, detail))


class ChainEnd(msgspec.Struct, frozen=True):
    """The end of a chain as it is recorded elsewhere: in `server.db`, or by the chain of a later process."""

    id: str
    entries: int
    hash: str


async def check_audit(book: Book, database: ServerDatabase) -> AuditReport:
    """Read all chains and return their deviations."""
    report = AuditReport(findings=[])
    journal = book.journal(AUDIT_TOPIC)
    ends = [ChainEnd(*row) for row in database.select("SELECT id, entries, hash FROM chain")]
    #: The hash of each group that an end names, as it was found.
    end_hashes: dict[tuple[str, int], str | None] = {}
    ids = sorted([id async for id in journal.ids()])
    for id in ids:
        ends += await _named_ends(journal.read(id, end=1))
    for end in ends:
        end_hashes[end.id, end.entries] = None
    for id in ids:
        report.chains += 1
        await _check_chain(report, id, journal.read(id), end_hashes)
    for end in dict.fromkeys(ends):
        found = end_hashes[end.id, end.entries]
        if found is None:
            report.add(end.id, end.entries, "removed", f"the chain had {end.entries} entries or more, and lost its end")
        elif found != end.hash:
            report.add(end.id, end.entries, "changed", "the entry is not the one that was recorded as the end")
    return report


async def _named_ends(events: AsyncIterator[Any]) -> list[ChainEnd]:
    """Return the ends that the first entry of a chain names."""
    try:
        async for event in events:
            entry = msgspec.convert(event.payload, AuditEntry)
            if entry.action == "server.start" and isinstance(entry.detail, dict):
                return msgspec.convert(entry.detail.get("previous", []), list[ChainEnd])
    except (TidebookError, msgspec.ValidationError):
        pass  # the check of the chain reports it
    return []


async def _check_chain(
    report: AuditReport, id: str, events: AsyncIterator[Any], end_hashes: dict[tuple[str, int], str | None]
) -> None:
    expected, missing = 1, set[int]()
    #: The entries since the last one with a hash; `is_complete` is False if their order or their numbers have changed.
    first, group_hash, is_complete = 1, GroupHash(GENESIS), True
    try:
        async for event in events:
            report.entries += 1
            try:
                entry = msgspec.convert(event.payload, AuditEntry)
            except msgspec.ValidationError as error:
                report.add(id, event.seq_nr, "foreign", f"event {event.seq_nr} is not an entry of the audit: {error}")
                continue
            if entry.n < expected:
                if entry.n in missing:
                    missing.discard(entry.n)
                    report.add(id, entry.n, "reordered", "it comes after entries with higher numbers")
                else:
                    report.add(id, entry.n, "repeated", "its number came before")
                continue
            if entry.n > expected:
                missing.update(range(expected, min(entry.n, expected + FINDINGS_MAX)))
                is_complete = False
            expected = entry.n + 1
            group_hash.add([msgspec.structs.replace(entry, hash="")])
            if entry.hash:
                if is_complete and entry.hash != group_hash.hex:
                    report.add(id, first, "changed", f"{_group(first, entry.n)} does not match its hash")
                if (id, entry.n) in end_hashes:
                    end_hashes[id, entry.n] = entry.hash
                first, group_hash, is_complete = expected, GroupHash(entry.hash), True
        if first < expected:
            report.add(id, first, "changed", f"{_group(first, expected - 1)} has no hash")
    except TidebookError as error:
        report.add(id, expected, "damaged", str(error))
    for n in sorted(missing):
        report.add(id, n, "removed", "there is no entry of this number")


def _group(first: int, last: int) -> str:
    """Return the name of a group of entries, of which at least one was changed."""
    return "it" if first == last else f"one or more of the entries {first} to {last}: their group"
