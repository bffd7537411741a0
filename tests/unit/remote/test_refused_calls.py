"""Calls that need direct access to the log or the store: a remote book names the refused call and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tidebook.core.errors import InvalidInput
from tidebook.wiring.remote_book import RemoteBook


@pytest.mark.parametrize(
    ("call", "reported"),
    [
        (lambda book: book.log, r"has no log: use the methods of the book"),
        (lambda book: book.store, r"has no store: use the methods of the book"),
        (lambda book: book.feed("paid", "mail"), r"has no feed\(\): run the feed where"),
        (lambda book: book.log_topic("orders"), r"has no log_topic\(\): read the messages where"),
        (lambda book: book.health(), r"has no health\(\): use readiness\(\), or request /v1/health/ready"),
        (lambda book: book.settle(), r"has no settle\(\): call it where"),
    ],
)
async def test_a_refused_call_is_named_with_the_remedy(call: Callable[[RemoteBook], Any], reported: str) -> None:
    with pytest.raises(InvalidInput, match=f"^a remote book {reported}"):
        await call(RemoteBook("http://127.0.0.1:1"))
