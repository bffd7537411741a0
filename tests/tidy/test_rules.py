"""Every rule of the journal has tests, and the tests that are named for a rule exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CONTRACTS = TESTS.parent / "src" / "tidebook" / "testing" / "conformance"
ROWS = {
    int(rule): re.findall(r"`([^`]+\.py::\w+)`", tests)
    for rule, tests in re.findall(r"^\| (\d+) \|[^|]*\|(.*)\|$", (TESTS / "model" / "README.md").read_text(), re.M)
}
RULES = [*range(1, 29)]


def test_every_rule_has_a_row() -> None:
    assert sorted(ROWS) == RULES


@pytest.mark.parametrize("rule", RULES)
def test_the_tests_of_a_rule_exist(rule: int) -> None:
    assert ROWS[rule]
    for name in ROWS[rule]:
        file, test = name.split("::")
        path = CONTRACTS / file.removeprefix("contract:") if file.startswith("contract:") else TESTS / file
        assert re.search(rf"def {test}\(", path.read_text()), name
