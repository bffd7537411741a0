"""Tests of the audit of dependencies, and of the licences in a bill of materials."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools.supply_chain import UNDETERMINED, add_licences, audit, read_audit

CLEAN = {"name": "a", "version": "1", "vulns": []}
VULNERABLE = {"name": "b", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
SKIPPED = {"name": "c", "skip_reason": "not found on PyPI"}


@pytest.mark.parametrize(
    ("packages", "code"), [([CLEAN], 0), ([CLEAN, VULNERABLE], 1), ([CLEAN, SKIPPED], UNDETERMINED)]
)
def test_an_audit_is_clean_only_if_every_package_was_looked_up(packages: list[Any], code: int) -> None:
    assert read_audit("base", 0, json.dumps({"dependencies": packages}), "") == code


@pytest.mark.parametrize("output", ["", "{}", "[1]", "no JSON"])
def test_no_answer_is_never_a_clean_audit(output: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert read_audit("base", 0, output, "trace\nConnectionError: refused") == UNDETERMINED
    assert "ConnectionError: refused" in capsys.readouterr().err


def test_an_unknown_set_or_service_is_refused() -> None:
    assert audit(["nonsense"]) == 2
    assert audit(["--service", "nonsense"]) == 2


def test_licences_are_added_where_there_are_none() -> None:
    document: dict[str, Any] = {"components": [{"name": "A"}, {"name": "b", "licenses": []}, {"name": "c"}]}
    add_licences(document, {"a": "MIT", "b": "BSD"})
    assert document["components"][0]["licenses"] == [{"license": {"name": "MIT"}}]
    assert document["components"][1:] == [{"name": "b", "licenses": []}, {"name": "c"}]
