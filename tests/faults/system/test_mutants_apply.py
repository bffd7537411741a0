"""Every mutant still changes the source: its text occurs exactly once."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from faults.mutants import MUTANTS, ROOT, Mutant, make_mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies(mutant: Mutant) -> None:
    ast.parse(mutant.apply((ROOT / "src" / "tidebook" / mutant.file).read_text()))


def test_a_mutant_is_a_copy(tmp_path: Path) -> None:
    make_mutant(MUTANTS[0], ROOT / "src", tmp_path / "src")
    assert MUTANTS[0].old not in (tmp_path / "src" / "tidebook" / MUTANTS[0].file).read_text()
    with pytest.raises(ValueError, match="0 times"):
        make_mutant(MUTANTS[0]._replace(old="no such text"), ROOT / "src", tmp_path / "other")


def test_there_are_enough_mutants_with_different_names() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 30
