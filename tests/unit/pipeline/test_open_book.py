"""A job that starts while a server is unavailable waits for it, up to a limit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tidebook.core.errors import InvalidInput, OutcomeUnknown, TidebookError, Unavailable
from tidebook.pipeline import errors as module
from tidebook.pipeline.errors import run_with_retries
from tidebook.runtime.blocking_portal import BlockingPortal


class UnavailableBook:
    """A book whose servers answer only after these errors."""

    def __init__(self, *errors: TidebookError) -> None:
        self.errors = list(errors)
        self.opened = False

    async def __aenter__(self) -> UnavailableBook:
        if self.errors:
            raise self.errors.pop(0)
        self.opened = True
        return self


@pytest.fixture
def portal(monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockingPortal]:
    monkeypatch.setattr(module, "RETRY_FIRST_S", 0.0)
    portal = BlockingPortal()
    yield portal
    portal.close()


def test_a_job_waits_for_a_server_that_is_down_when_it_starts(portal: BlockingPortal) -> None:
    book: Any = UnavailableBook(Unavailable("Cassandra does not answer"), OutcomeUnknown("no answer"))
    reported: list[str] = []
    run_with_retries(portal, book.__aenter__, stop=threading.Event(), report=lambda reason, _: reported.append(reason))
    assert book.opened
    assert reported == ["Cassandra does not answer", "no answer"]


def test_a_job_that_is_stopped_while_it_waits_ends(portal: BlockingPortal) -> None:
    book: Any = UnavailableBook(*[Unavailable("it is down") for _ in range(100)])
    stop = threading.Event()
    with pytest.raises(Unavailable):
        run_with_retries(portal, book.__aenter__, stop=stop, report=lambda *_: stop.set())
    assert len(book.errors) == 98


def test_a_job_waits_up_to_its_limit_and_not_at_all_for_a_permanent_error(portal: BlockingPortal) -> None:
    book: Any = UnavailableBook(Unavailable("it is down"))
    with pytest.raises(Unavailable):
        run_with_retries(portal, book.__aenter__, stop=threading.Event(), report=lambda *_: None, within_s=0.0)
    book = UnavailableBook(InvalidInput("a wrong password"))
    with pytest.raises(InvalidInput):
        run_with_retries(portal, book.__aenter__, stop=threading.Event(), report=lambda *_: None)
