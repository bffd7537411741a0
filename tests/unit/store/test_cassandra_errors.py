"""Translation of the driver's errors: nothing was changed, or the outcome is unknown."""

from __future__ import annotations

from typing import Any

import pytest
from acsylla import errors

from tidebook.core.errors import OutcomeUnknown, TidebookError, Unavailable
from tidebook.runtime.metrics import Metrics
from tidebook.store.cassandra.errors import NOT_SENT, TRANSIENT, WriteAttempts, translate
from tidebook.store.cassandra.mutations import CqlStatement
from tidebook.store.cassandra.session import CassandraSession
from tidebook.store.cassandra.settings import CassandraSettings


@pytest.mark.parametrize("error", TRANSIENT)
def test_a_read_that_fails_transiently_is_unavailable(error: type[errors.CassException]) -> None:
    assert type(translate(error("reported"), "a read")) is Unavailable


@pytest.mark.parametrize("attempts", ["once", "repeatedly"])
@pytest.mark.parametrize("error", NOT_SENT)
def test_a_write_that_was_never_sent_is_unavailable(error: type[errors.CassException], attempts: WriteAttempts) -> None:
    assert type(translate(error("reported"), "a write", attempts=attempts)) is Unavailable


@pytest.mark.parametrize(
    ("attempts", "meaning"),
    [
        # If a connection breaks, the driver resends it to the next node; none may be left after one has executed it.
        ("repeatedly", OutcomeUnknown),
        # A statement that is not resent fails with a timeout if its connection breaks.
        ("once", Unavailable),
    ],
)
def test_a_write_without_a_node_left_is_unknown_only_if_it_may_have_been_executed(
    attempts: WriteAttempts, meaning: type[TidebookError]
) -> None:
    assert type(translate(errors.CassErrorLibNoHostsAvailable("reported"), "a write", attempts=attempts)) is meaning


@pytest.mark.parametrize("attempts", ["once", "repeatedly"])
@pytest.mark.parametrize("error", [e for e in TRANSIENT if e not in (*NOT_SENT, errors.CassErrorLibNoHostsAvailable)])
def test_any_other_failure_makes_the_outcome_of_a_write_unknown(
    error: type[errors.CassException], attempts: WriteAttempts
) -> None:
    assert type(translate(error("reported"), "a write", attempts=attempts)) is OutcomeUnknown


class Driver:
    """A driver that raises these errors in turn, and then the last one for ever."""

    def __init__(self, *failures: type[errors.CassException]) -> None:
        self._failures = list(failures)
        self.idempotent: bool | None = None
        self.retry_policy = "default"

    async def create_prepared(self, cql: str, timeout: float) -> Driver:
        return self

    def bind(self, values: list[Any], **options: Any) -> Driver:
        return self

    def set_is_idempotent(self, idempotent: bool) -> None:
        self.idempotent = idempotent

    def set_retry_policy(self, policy: str) -> None:
        self.retry_policy = policy

    async def execute(self, statement: object) -> None:
        raise (self._failures.pop(0) if len(self._failures) > 1 else self._failures[0])("reported")


@pytest.mark.parametrize(
    ("failures", "meaning"),
    [
        ([errors.CassErrorLibRequestTimedOut, errors.CassErrorLibRequestQueueFull], OutcomeUnknown),
        ([errors.CassErrorLibRequestQueueFull], Unavailable),
    ],
    ids=["sent once", "never sent"],
)
async def test_a_write_that_was_sent_once_has_an_unknown_outcome_whatever_its_last_error(
    failures: list[type[errors.CassException]], meaning: type[TidebookError]
) -> None:
    settings = CassandraSettings.read("cassandra://one/books", {"write_deadline_s": 0.1})
    driver = Driver(*failures)
    with pytest.raises(meaning):
        await CassandraSession(None, driver, settings, Metrics()).write([CqlStatement("INSERT", [])])
    assert driver.idempotent


async def test_the_driver_may_not_resend_a_compare_and_set() -> None:
    """A node that reports a failure may have applied it: the next node would take its value for another writer's."""
    driver = Driver(errors.CassErrorServerUnavailable)
    session = CassandraSession(None, driver, CassandraSettings.read("cassandra://one/books"), Metrics())
    with pytest.raises(OutcomeUnknown):
        await session.compare_and_set("INSERT IF NOT EXISTS", [])
    assert (driver.idempotent, driver.retry_policy) == (False, "fallthrough")
