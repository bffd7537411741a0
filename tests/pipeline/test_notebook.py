"""The code cells of the example notebook run in order, twice in the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]
NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebook" / "orders.ipynb"


def test_the_notebook_sums_the_payments(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = [each for each in json.loads(NOTEBOOK.read_text())["cells"] if each["cell_type"] == "code"]
    assert all(not each["outputs"] for each in cells)  # the committed notebook has no outputs
    for _ in range(2):
        inside: dict[str, Any] = {}
        for cell in cells:
            exec("".join(cell["source"]), inside)
        assert inside["totals"] == {"lamp": 85}
