"""The page about guarantees names every fault of the schedule, and only tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

from faults.proxy import MODES
from faults.schedule import (
    DISK_ERROR,
    DISK_FULL,
    FOREIGN,
    MORE_PARTITIONS,
    ONE_DOWN,
    PARTITIONS,
    ROLLING,
    UPGRADE,
)

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "explanation" / "guarantees.md").read_text()
KINDS = {
    "kill", "pause", "clock", DISK_ERROR, DISK_FULL, FOREIGN, MORE_PARTITIONS, ONE_DOWN, ROLLING, UPGRADE,
    *PARTITIONS, *MODES,
}  # fmt: skip


def test_every_fault_has_a_row() -> None:
    named = {word for row in re.findall(r"^\| ([^|]+) \|", PAGE, re.M) for word in re.findall(r"`(\w+)`", row)}
    assert named == KINDS


def test_the_tests_that_it_names_exist() -> None:
    found = re.findall(r"`(tests/\S+\.py)::(\w+)`", PAGE)
    assert len(found) >= 8
    for file, name in found:
        assert f"def {name}(" in (ROOT / file).read_text(), name
