"""Spark's data source on a missing book raises an error and creates nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidebook.core.errors import NotFound

pytest.importorskip("pyspark")


@pytest.mark.parametrize("topic", [{}, {"topic": "orders"}])
def test_a_missing_book_is_not_found_and_is_not_created(tmp_path: Path, topic: dict[str, str]) -> None:
    from tidebook.pipeline.source.format import TidebookSource

    with pytest.raises(NotFound, match="there is no book"):
        TidebookSource({"book": str(tmp_path / "nope"), **topic}).reader(None).partitions()  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
