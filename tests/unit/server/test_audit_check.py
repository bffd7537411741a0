"""The check of the audit names the entries of which at least one was changed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tidebook.server.audit_check import AuditReport, _check_chain
from tidebook.server.audit_entry import GENESIS, AuditEntry, encode_group

ENTRIES = [
    AuditEntry(n=n, at_ms=n, who="ops", role="admin", client="", action="put", target="mail", status=200)
    for n in range(1, 5)
]


async def events_of(payloads: list[Any]) -> AsyncIterator[Any]:
    for number, payload in enumerate(payloads, 1):
        yield SimpleNamespace(payload=payload, seq_nr=number)


@pytest.mark.parametrize(
    ("changed", "detail"),
    [
        ({1: {"who": "other"}}, "it does not match its hash"),
        ({3: {"who": "other"}}, "one or more of the entries 2 to 4: their group does not match its hash"),
        ({4: {"hash": ""}}, "one or more of the entries 2 to 4: their group has no hash"),
    ],
    ids=["alone", "in a group", "without a hash"],
)
async def test_the_group_of_a_changed_entry_is_named(changed: dict[int, dict[str, Any]], detail: str) -> None:
    first, previous = encode_group(ENTRIES[:1], GENESIS)
    payloads = [msgspec.json.decode(each) for each in (*first, *encode_group(ENTRIES[1:], previous)[0])]
    report = AuditReport(findings=[])
    await _check_chain(report, "chain", events_of([each | changed.get(each["n"], {}) for each in payloads]), {})
    assert [(each.what, each.detail) for each in report.findings] == [("changed", detail)]
