"""Requests to the driver: their options, when they are retried, and how many are in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("acsylla")

import acsylla
from acsylla import errors

from tests.simulation.virtual_time import run_in_virtual_time as run
from tidebook.core.errors import Corrupt, InvalidInput, OutcomeUnknown, TidebookError, Unavailable
from tidebook.runtime.metrics import Metrics
from tidebook.store.cassandra.errors import translate
from tidebook.store.cassandra.mutations import CqlStatement
from tidebook.store.cassandra.session import (
    OVERDUE_S,
    SCHEMA_OVERDUE_S,
    SCHEMA_TIMEOUT_S,
    CassandraSession,
    run_bounded,
)
from tidebook.store.cassandra.settings import CassandraSettings

SINGLE = [CqlStatement("ONE", [1])]
DOUBLE = [CqlStatement("ONE", [1]), CqlStatement("TWO", [2])]
QUEUE_FULL = errors.CassErrorLibRequestQueueFull
TIMED_OUT = errors.CassErrorServerWriteTimeout


class Statement:
    """A prepared statement, a bound one and a batch, with the options that were set."""

    def __init__(self, cql: str, values: Any = None, **options: Any) -> None:
        self.cql, self.values, self.options = cql, values, options
        self.idempotent: bool | None = None
        self.added: list[Statement] = []

    def bind(self, values: Any, **options: Any) -> Statement:
        return Statement(self.cql, values, **options)

    def set_is_idempotent(self, idempotent: bool) -> None:
        self.idempotent = idempotent

    def set_retry_policy(self, policy: str) -> None:
        self.options["retry"] = policy

    def set_consistency(self, level: Any) -> None:
        self.options["consistency"] = level

    def add_statement(self, statement: Statement) -> None:
        self.added.append(statement)


class Page(list[Any]):
    def __init__(self, more: bytes | None = None) -> None:
        super().__init__()
        self.more = more

    def has_more_pages(self) -> bool:
        return self.more is not None

    def page_state(self) -> bytes | None:
        return self.more

    def first(self) -> Page:
        return self

    def as_dict(self) -> dict[str, Any]:
        return {"[applied]": True}


class Driver:
    """Fails with these errors in turn, then answers; `gate` holds every request until the test opens it."""

    def __init__(self, *failures: type[errors.CassException], for_ever: bool = False) -> None:
        self.failures, self.for_ever = list(failures), for_ever
        self.sent: list[Statement] = []
        self.prepared: list[str] = []
        self.pages: list[Page] = []
        self.gate: asyncio.Event | None = None
        self.in_flight = self.most = self.cancelled = 0
        self.times_s: list[float] = []

    async def create_prepared(self, cql: str, timeout: float) -> Statement:
        self.prepared.append(cql)
        if self.gate is not None:
            await self.gate.wait()
        return Statement(cql)

    async def execute(self, statement: Statement) -> Any:
        self.sent.append(statement)
        self.times_s.append(asyncio.get_running_loop().time())
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            if self.gate is not None:
                await self.gate.wait()
            else:
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1
        if self.failures:
            raise (self.failures[0] if self.for_ever and len(self.failures) == 1 else self.failures.pop(0))("no answer")
        return self.pages.pop(0) if self.pages else Page()

    execute_batch = execute

    async def query(self, text: str, timeout: float) -> Page:
        return Page()

    async def use_keyspace(self, keyspace: str) -> None:
        pass


def session_of(driver: Driver, **options: Any) -> CassandraSession:
    settings = CassandraSettings.read("cassandra://one/books", options, environment={})
    return CassandraSession(driver, driver, settings, Metrics(), new_batch=lambda **given: Statement("batch", **given))


async def let_tasks_run(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# ---- options of a request


def test_a_write_may_be_resent_and_has_the_consistency_and_timeout_of_writes() -> None:
    driver = Driver()
    session = session_of(driver, write_consistency="EACH_QUORUM", write_timeout_s=7.0)
    expected = {"consistency": acsylla.Consistency.EACH_QUORUM, "timeout": 7.0}
    run(lambda: session.write(SINGLE))
    run(lambda: session.write(DOUBLE))
    run(lambda: session.write_once(SINGLE[0]))
    one, two, three = driver.sent
    assert [(each.idempotent, each.options) for each in (one, two, three)] == [(True, expected)] * 3
    assert [(each.cql, each.values) for each in two.added] == [("ONE", [1]), ("TWO", [2])]
    assert [(each.cql, each.values) for each in (one, three)] == [("ONE", [1])] * 2


def test_a_compare_and_set_has_both_consistency_levels_and_may_not_be_resent() -> None:
    driver = Driver()
    session = session_of(driver, write_timeout_s=7.0, serial_consistency="LOCAL_SERIAL")
    assert run(lambda: session.compare_and_set("IF", [3])) == {"[applied]": True}
    [sent] = driver.sent
    assert sent.idempotent is False
    assert sent.options == {
        "consistency": acsylla.Consistency.LOCAL_QUORUM,
        "serial_consistency": acsylla.Consistency.LOCAL_SERIAL,
        "timeout": 7.0,
        "retry": "fallthrough",
    }


def test_a_read_has_its_page_size_and_the_timeout_of_reads() -> None:
    driver = Driver()
    session = session_of(driver, read_timeout_s=2.0)
    run(lambda: session.read("SELECT", [5], page_size=9, page_state=b"state"))
    [sent] = driver.sent
    assert (sent.values, sent.idempotent) == ([5], True)
    assert (sent.options["page_size"], sent.options["page_state"], sent.options["timeout"]) == (9, b"state", 2.0)


def test_after_a_fork_every_request_is_refused_and_nothing_is_closed() -> None:
    driver = Driver()
    session = session_of(driver)
    session._generation -= 1
    requests: list[Callable[[], Awaitable[Any]]] = [
        lambda: session.read("SELECT", []),
        lambda: session.read_serial("SELECT", []),
        lambda: session.write(SINGLE),
        lambda: session.write_once(SINGLE[0]),
        lambda: session.compare_and_set("IF", []),
        lambda: session.define("CREATE"),
        lambda: session.query("SELECT"),
        lambda: session.use("books"),
    ]
    for request in requests:
        with pytest.raises(InvalidInput, match="fork"):
            run(request)
    run(session.close)  # the fake driver has no `close`
    assert not driver.sent


# ---- preparing


async def test_concurrent_requests_prepare_a_statement_once_even_if_one_of_them_is_cancelled() -> None:
    driver = Driver()
    driver.gate = asyncio.Event()
    session = session_of(driver)
    impatient = asyncio.create_task(session.read("SELECT", []))
    patient = asyncio.create_task(session.read("SELECT", []))
    await let_tasks_run()
    impatient.cancel()
    await let_tasks_run()
    driver.gate.set()
    assert await patient == []
    assert impatient.cancelled()
    await session.read("SELECT", [])
    assert driver.prepared == ["SELECT"]


# ---- retries


def test_a_write_is_retried_with_growing_pauses_until_it_is_acknowledged() -> None:
    driver = Driver(TIMED_OUT, QUEUE_FULL, TIMED_OUT)
    run(lambda: session_of(driver).write(SINGLE))
    assert driver.times_s == pytest.approx([0.0, 0.05, 0.15, 0.35])


def test_a_write_is_not_retried_after_its_deadline() -> None:
    """Pauses of 0.05, 0.1, 0.2 and 0.4 s end at 0.75 s; an attempt is still made exactly at the deadline."""
    for deadline_s, attempts in ((0.7, 4), (0.75, 5), (0.8, 5)):
        driver = Driver(TIMED_OUT, for_ever=True)
        with pytest.raises(OutcomeUnknown):
            run(partial(session_of(driver, write_deadline_s=deadline_s).write, SINGLE))
        assert len(driver.sent) == attempts


@pytest.mark.parametrize(
    ("failures", "meaning"),
    [
        ([QUEUE_FULL], Unavailable),
        ([TIMED_OUT, QUEUE_FULL], OutcomeUnknown),
        ([QUEUE_FULL, TIMED_OUT, QUEUE_FULL], OutcomeUnknown),
        ([QUEUE_FULL, TIMED_OUT], OutcomeUnknown),
    ],
)
@pytest.mark.parametrize("batch", [SINGLE, DOUBLE], ids=["one", "two"])
def test_the_outcome_of_a_write_that_may_have_been_sent_stays_unknown(
    failures: list[type[errors.CassException]], meaning: type[TidebookError], batch: list[CqlStatement]
) -> None:
    driver = Driver(*failures, for_ever=True)
    with pytest.raises(meaning) as caught:
        run(lambda: session_of(driver, write_deadline_s=1.0).write(batch))
    assert isinstance(caught.value.__cause__, TIMED_OUT if meaning is OutcomeUnknown else QUEUE_FULL)


def test_a_write_that_can_never_succeed_is_not_retried() -> None:
    driver = Driver(errors.CassErrorServerSyntaxError, for_ever=True)
    with pytest.raises(Corrupt):
        run(lambda: session_of(driver).write(SINGLE))
    assert len(driver.sent) == 1


def test_a_write_that_may_be_sent_only_once_is_not_retried() -> None:
    driver = Driver(TIMED_OUT, for_ever=True)
    with pytest.raises(OutcomeUnknown):
        run(lambda: session_of(driver).write_once(SINGLE[0]))
    assert len(driver.sent) == 1


def test_a_contended_serial_read_waits_longer_before_each_attempt() -> None:
    driver = Driver(errors.CassErrorServerReadTimeout, for_ever=True)
    with pytest.raises(Unavailable):
        run(lambda: session_of(driver).read_serial("SELECT", []))
    # Each pause is random, between half and all of the growing pause.
    pauses_s = [later - before for before, later in pairwise(driver.times_s)]
    assert len(pauses_s) == 4
    assert all(
        most_s / 2 <= pause_s <= most_s + 1e-6 for pause_s, most_s in zip(pauses_s, (0.05, 0.1, 0.2, 0.4), strict=True)
    )


@pytest.mark.parametrize("message", ["the username and/or password are wrong", "Bad credentials for me"])
def test_wrong_credentials_are_recognized_by_the_message_too(message: str) -> None:
    """The driver reports them as a host that cannot be reached."""
    assert type(translate(errors.CassErrorLibNoHostsAvailable(message), "a read")) is InvalidInput


def test_a_tls_connection_that_was_closed_is_transient_and_a_refused_certificate_is_not() -> None:
    assert type(translate(errors.CassErrorSslClosed("closed"), "a read")) is Unavailable
    assert type(translate(errors.CassErrorSslInvalidCert("bad"), "a read")) is InvalidInput


# ---- a driver that never answers


class Silent(Driver):
    """A driver that prepares statements, if at all, and never answers a request."""

    def __init__(self, *, prepares: bool = True) -> None:
        super().__init__()
        self.prepares = prepares

    async def create_prepared(self, cql: str, timeout: float) -> Statement:
        return await super().create_prepared(cql, timeout) if self.prepares else await self._never()

    async def execute(self, statement: Statement) -> Any:
        return await self._never()

    execute_batch = execute

    async def query(self, text: str, timeout: float) -> Page:
        return await self._never()

    async def use_keyspace(self, keyspace: str) -> None:
        await self._never()

    async def _never(self) -> Any:
        await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize(
    ("request_of", "meaning", "ends_s"),
    [
        (lambda session: session.read("SELECT", []), Unavailable, 2 + OVERDUE_S),
        (lambda session: session.read_serial("SELECT", []), Unavailable, 2 + OVERDUE_S),
        (lambda session: session.query("SELECT"), Unavailable, 2 + OVERDUE_S),
        (lambda session: session.use("books"), Unavailable, 2 + OVERDUE_S),
        (lambda session: session.compare_and_set("IF", []), OutcomeUnknown, 7 + OVERDUE_S),
        (lambda session: session.write_once(SINGLE[0]), OutcomeUnknown, 7 + OVERDUE_S),
        (lambda session: session.write(SINGLE), OutcomeUnknown, 7 + OVERDUE_S),
        (lambda session: session.write(DOUBLE), OutcomeUnknown, 7 + OVERDUE_S),
        (lambda session: session.define("CREATE"), OutcomeUnknown, SCHEMA_TIMEOUT_S + SCHEMA_OVERDUE_S),
    ],
    ids=["read", "read_serial", "query", "use", "compare_and_set", "write_once", "write", "batch", "define"],
)
def test_a_request_that_the_driver_loses_ends_soon_after_its_timeout(
    request_of: Callable[[CassandraSession], Awaitable[Any]], meaning: type[TidebookError], ends_s: float
) -> None:
    session = session_of(Silent(), read_timeout_s=2.0, write_timeout_s=7.0, write_deadline_s=7.0)

    async def lose() -> float:
        with pytest.raises(meaning, match="no answer within"):
            await request_of(session)
        return asyncio.get_running_loop().time()

    assert run(lose) == pytest.approx(ends_s)


def test_a_statement_whose_preparation_is_lost_is_prepared_again() -> None:
    driver = Silent(prepares=False)
    session = session_of(driver)

    async def lose() -> None:
        reads = await asyncio.gather(*(session.read("SELECT", []) for _ in range(2)), return_exceptions=True)
        assert [type(each) for each in reads] == [Unavailable] * 2
        driver.prepares = True
        with pytest.raises(Unavailable):
            await session.read("SELECT", [])
        assert driver.prepared == ["SELECT"]

    run(lose)


# ---- in flight


@pytest.mark.parametrize(("batch", "most"), [(SINGLE, 6), (DOUBLE, 3)], ids=["single statements", "batches"])
async def test_the_writes_in_flight_are_bounded(batch: list[CqlStatement], most: int) -> None:
    driver = Driver()
    session = session_of(driver, in_flight_max=3)
    await session.write(DOUBLE)
    driver.most = 0
    await asyncio.gather(*(session.write(batch) for _ in range(20)))
    assert (driver.most, len(driver.sent)) == (most, 21)


async def test_snapshots_and_settings_share_the_bound_of_single_statements() -> None:
    driver = Driver()
    session = session_of(driver, in_flight_max=2)
    await session.write(SINGLE)
    driver.most = 0
    await asyncio.gather(*(session.write_once(SINGLE[0]) for _ in range(20)))
    assert driver.most == 4


async def test_the_next_page_is_prefetched_and_cancelled_if_the_reader_stops() -> None:
    driver = Driver()
    driver.pages = [Page(b"1"), Page(b"2"), Page()]
    session = session_of(driver)
    pages = session.pages("SELECT", [], page_size=3)
    await anext(pages)
    await let_tasks_run()
    assert len(driver.sent) == 2
    driver.gate = asyncio.Event()
    await anext(pages)
    await let_tasks_run()
    assert (len(driver.sent), driver.in_flight) == (3, 1)
    await pages.aclose()  # type: ignore[attr-defined]
    await let_tasks_run()
    assert (driver.in_flight, driver.cancelled) == (0, 1)


async def test_a_single_page_is_not_followed_by_another_request() -> None:
    driver = Driver()
    assert [len(page) async for page in session_of(driver).pages("SELECT", [], page_size=3)] == [0]
    assert len(driver.sent) == 1


@pytest.mark.parametrize(("count", "at_once", "most"), [(1, 5, 1), (2, 5, 2), (5, 2, 2), (5, 5, 5), (5, 1, 1)])
async def test_items_run_concurrently_up_to_the_bound(count: int, at_once: int, most: int) -> None:
    running = peak = 0

    async def act(_: int) -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await let_tasks_run(3)
        running -= 1

    await run_bounded(act, range(count), at_once=at_once)
    assert peak == most


async def test_when_one_item_fails_those_in_flight_have_ended_before_the_error_is_raised() -> None:
    ended: list[str] = []

    async def act(item: int) -> None:
        if item == 0:
            raise ValueError("this one")
        try:
            await asyncio.Event().wait()
        finally:
            await let_tasks_run()
            ended.append("cancelled")

    items: Sequence[int] = range(10)
    with pytest.raises(ValueError, match="this one"):
        await asyncio.wait_for(run_bounded(act, items, at_once=3), 30)
    assert ended == ["cancelled"] * 2
