"""Which values the outbox's settings and calls accept and refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tidebook
from tidebook import outbox
from tidebook.core.errors import InvalidInput
from tidebook.outbox import Message
from tidebook.outbox.mysql import connect_parameters
from tidebook.outbox.outbox import Outbox
from tidebook.outbox.settings import OutboxSettings


@pytest.mark.parametrize(
    "wrong",
    [
        {"lock_limit_s": 0},
        {"lock_limit_s": 0.0001},
        {"lock_limit_s": float("nan")},
        {"poll_s": float("inf")},
        {"rest_s": 1e300},
        {"threads": 1_000_000},
        {"batch_rows": 0},
        {"fence_s": 31},
        {"fence_s": 1e-9},
        {"fence_s": float("nan")},
    ],
)
def test_a_setting_out_of_bounds_is_refused(wrong: dict[str, Any]) -> None:
    [name] = wrong
    with pytest.raises(InvalidInput, match=name):
        OutboxSettings(**wrong)


@pytest.mark.parametrize("url", ["mysql://u@host:port/x", "mysql://", "oracle://host/x"])
def test_a_url_that_is_not_mysqls_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput):
        connect_parameters(url)


@pytest.mark.parametrize(
    "call",
    [
        lambda each: each.relay(threads="2"),
        lambda each: each.relay(threads=0),
        lambda each: each.status(count_max=0),
        lambda each: each.parked(limit=-1),
        lambda each: each.parked(limit=10**30),
        lambda each: each.parked("a\0b"),
        lambda each: each.parked_retry(5),
        lambda each: each.parked_drop(None),
        lambda each: each.publish_alone(5),
        lambda each: each.publish_alone([b"x"]),
        lambda each: each.publish_alone([Message("orders", b"x", headers=(("a", 5),))]),  # type: ignore[arg-type]
        lambda each: outbox.configure(5),  # type: ignore[arg-type]
        lambda each: outbox.use(5).__enter__(),  # type: ignore[arg-type]
    ],
)
def test_a_call_with_invalid_arguments_changes_nothing(call: Callable[[Outbox], object], tmp_path: Path) -> None:
    with tidebook.open_sync(tmp_path / "book") as book:
        with pytest.raises(InvalidInput):
            call(book.outbox)
        assert book.outbox.status() == []
