"""A part whose package is not installed names the extra that brings it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import tidebook
from tidebook import InvalidInput


@pytest.mark.parametrize("part", ["process", "projection"])
async def test_a_part_without_sqlalchemy_names_its_extra(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "tidebook.wiring.projection", raising=False)
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    async with tidebook.open(tmp_path) as book:
        with pytest.raises(InvalidInput, match=r"sqlalchemy is not installed: pip install 'tidebook\[projections\]'"):
            book.process("mails") if part == "process" else book.projection("sales", into=None)
