"""`tidebook.spark` refuses what is not a book on this machine or on servers, before it starts Java."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

import tidebook
from tidebook.core.errors import InvalidInput, NotFound
from tidebook.core.event import Event


@pytest.mark.parametrize("open_book", [tidebook.open, tidebook.open_sync])
def test_a_book_on_a_server_is_refused_even_if_the_current_folder_is_a_book(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_book: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with tidebook.open_sync(tmp_path) as other:
        other.journal("orders").append("a", [Event(1)])
    with pytest.raises(InvalidInput, match="cannot read a book through https://host:8470: use its folder or"):
        tidebook.spark(open_book("https://host:8470", token="t"))
    with pytest.raises(InvalidInput, match="https:// is not supported here"):
        tidebook.spark("https://host:8470")


@pytest.mark.parametrize("wrong", [None, 3, {"folder": "x"}])
def test_what_is_not_a_book_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match=f"or an open book, not {type(wrong).__name__}"):
        tidebook.spark(wrong)


def test_a_missing_book_is_not_found_and_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no book in"):
        tidebook.spark(tmp_path / "nope")
    assert not (tmp_path / "nope").exists()
