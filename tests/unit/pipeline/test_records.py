"""Slices are merged from Arrow batches, which Spark may split anywhere."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tidebook.log.port import Record
from tidebook.pipeline.source import records as module
from tidebook.pipeline.source.records import merge_slices, to_arrow


def records(first: int, stop: int, value: bytes = b"v") -> list[Record]:
    return [Record(offset, 5, b"k", value) for offset in range(first, stop)]


def batch(*runs: tuple[int, int, int]) -> pa.RecordBatch:
    """Return a batch of runs, each with partition, first offset and stop."""
    return pa.concat_batches([to_arrow("t", partition, records(first, stop)) for partition, first, stop in runs])


def spans(batches: list[pa.RecordBatch]) -> list[tuple[int, int, int]]:
    return [(partition, some[0].offset, some[-1].offset + 1) for _, partition, some in merge_slices(batches)]


def test_a_run_that_a_batch_boundary_splits_is_one_slice() -> None:
    cut = [batch((0, 0, 3), (1, 5, 7)), batch((1, 7, 9), (2, 0, 1)), batch((2, 1, 2)), batch((2, 2, 4), (3, 0, 1))]
    assert spans(cut) == [(0, 0, 3), (1, 5, 9), (2, 0, 4), (3, 0, 1)]


def test_a_slice_stays_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE_RECORDS_MAX", 4)
    assert spans([batch((0, 0, 3)), batch((0, 3, 4)), batch((0, 4, 6))]) == [(0, 0, 4), (0, 4, 6)]
    monkeypatch.setattr(module, "SLICE_VALUE_BYTES_MAX", 3)
    assert spans([batch((0, 0, 2)), batch((0, 2, 4))]) == [(0, 0, 2), (0, 2, 4)]


def test_no_batches_give_no_slice() -> None:
    assert spans([]) == []
