"""A thin layer over Cassandra's driver: connect, prepare, execute, retry, and translate all errors."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from itertools import chain, islice
from typing import Any, Final, TypeVar

import acsylla
from acsylla import errors

from tidebook.core.errors import Unavailable
from tidebook.runtime.backoff import Backoff
from tidebook.runtime.futures import cancel_quietly
from tidebook.runtime.metrics import Metrics
from tidebook.runtime.process import generation, refuse_fork
from tidebook.store.cassandra.errors import NOT_SENT, TRANSIENT, translate, translated
from tidebook.store.cassandra.mutations import Batch, CqlStatement
from tidebook.store.cassandra.settings import CassandraSettings

T = TypeVar("T")

_random = random.Random()


async def run_bounded(run: Callable[[T], Awaitable[None]], items: Iterable[T], *, at_once: int) -> None:
    """Await `run` for every item, at most `at_once` at a time; the first failure cancels the rest and is raised."""
    waiting = iter(items)
    first = list(islice(waiting, at_once))
    if len(first) <= 1:
        for item in chain(first, waiting):  # sequentially, if only one may be in flight
            await run(item)
        return
    # Each task starts with one item and then takes from the shared iterator, so items are only created when needed.

    async def work(item: T) -> None:
        for next_item in chain((item,), waiting):
            await run(next_item)

    tasks = [asyncio.ensure_future(work(item)) for item in first]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


RECONNECT_MS: Final = 250
RETRY_FIRST_S: Final = 0.05
RETRY_MAX_S: Final = 1.0
#: How often an idle connection is checked, and how long one may go without a response before it is closed.
HEARTBEAT_S: Final = 5
IDLE_S: Final = 15
SCHEMA_TIMEOUT_S: Final = 60
#: The driver counts a timeout from when it first sends the request, and after DDL it waits ten seconds for the nodes to
#: agree. A request without an answer this long after its timeout is lost.
OVERDUE_S: Final = 5.0
SCHEMA_OVERDUE_S: Final = 15.0
#: Concurrent serial reads and compare-and-sets of one setting contend, and may time out although all nodes are up.
SERIAL_ATTEMPTS: Final = 5
#: The errors of a serial read that contends; it fails like a write if it has to complete another compare-and-set.
CONTENDED: Final = (errors.CassErrorServerReadTimeout, errors.CassErrorServerWriteTimeout)
#: How many single statements may be in flight for each batch that may: 128 batches or 256 rows saturate a node.
SINGLES_PER_BATCH: Final = 2

_VERIFY: Final = {
    "certificate": acsylla.SSLVerifyFlags.PEER_CERT,
    "address": acsylla.SSLVerifyFlags.PEER_IDENTITY,
    "name": acsylla.SSLVerifyFlags.PEER_IDENTITY_DNS,
}


async def _answer(request: Awaitable[T], timeout_s: float, *, overdue_s: float = OVERDUE_S) -> T:
    """Await the driver's answer to a request with this timeout; a lost one counts as timed out."""
    try:
        async with asyncio.timeout(timeout_s + overdue_s):
            return await request
    except TimeoutError as late:
        raise errors.CassErrorLibRequestTimedOut(f"no answer within {timeout_s + overdue_s:g} s") from late


class CassandraSession:
    """Prepared statements on one cluster, for the event loop that opened it.

    `new_batch` creates an unlogged batch that `session` can execute; a simulated session needs batches of its own.
    """

    def __init__(
        self,
        cluster: Any,
        session: Any,
        settings: CassandraSettings,
        metrics: Metrics,
        *,
        new_batch: Callable[..., Any] = acsylla.create_batch_unlogged,
    ) -> None:
        self._cluster = cluster
        self._session = session
        self.local_dc = settings.local_dc
        self._settings = settings
        self._metrics = metrics
        self._new_batch = new_batch
        self._prepared: dict[str, Any] = {}
        self._preparing: dict[str, asyncio.Future[Any]] = {}
        self._batches = asyncio.Semaphore(settings.in_flight_max)
        self._singles = asyncio.Semaphore(settings.in_flight_max * SINGLES_PER_BATCH)
        self._reading = acsylla.Consistency[settings.reading]
        self._writing = acsylla.Consistency[settings.writing]
        self._closed = False
        self._serial = acsylla.Consistency[settings.serial_consistency]
        self._generation = generation()

    def _refuse_fork(self) -> None:
        """Raise InvalidInput in a forked child, where the driver's threads do not exist."""
        refuse_fork(self._generation, "the store")

    async def read(
        self,
        cql: str,
        values: Sequence[Any],
        *,
        page_size: int = 5000,
        page_state: bytes | None = None,
        level: Any = None,
    ) -> Any:
        """Return one page of rows, by default at the reading consistency level."""
        self._refuse_fork()
        with translated("a read"):
            prepared = self._prepared.get(cql) or await self._prepare(cql)
            statement = prepared.bind(
                values, page_size=page_size, page_state=page_state, timeout=self._settings.read_timeout_s,
                consistency=self._reading if level is None else level,
            )  # fmt: skip
            statement.set_is_idempotent(True)
            began = time.perf_counter()
            result = await _answer(self._session.execute(statement), self._settings.read_timeout_s)
        self._metrics.time("cassandra_read", time.perf_counter() - began)
        return result

    async def read_serial(self, cql: str, values: Sequence[Any]) -> Any:
        """Read a compare-and-set table linearizably; an unfinished compare-and-set is completed or discarded first."""
        backoff = Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S)
        for attempt in range(SERIAL_ATTEMPTS):
            try:
                return await self.read(cql, values, level=self._serial)
            except Unavailable as error:
                if not isinstance(error.__cause__, CONTENDED) or attempt + 1 == SERIAL_ATTEMPTS:
                    raise
            # Wait a random time, because readers that contend would otherwise contend again.
            await asyncio.sleep(_random.uniform(0.5, 1.0) * backoff.next_s())

    async def pages(self, cql: str, values: Sequence[Any], *, page_size: int) -> AsyncIterator[Any]:
        """Yield all pages of a query, fetching the next one while the current one is used."""
        next_page: asyncio.Task[Any] | None = None
        page = await self.read(cql, values, page_size=page_size)
        try:
            while page.has_more_pages():
                next_page = asyncio.ensure_future(
                    self.read(cql, values, page_size=page_size, page_state=page.page_state())
                )
                yield page
                page = await next_page
            yield page
        finally:
            if next_page is not None:
                cancel_quietly(next_page)

    async def write(self, batch: Batch) -> None:
        """Execute one batch, with retries until it is acknowledged or the deadline has passed.

        Retries are harmless, because the writes of a slice carry their own stamps, and necessary, because a write that
        timed out may have reached too few replicas to be read.
        """
        self._refuse_fork()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._settings.write_deadline_s
        backoff = Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S)
        worst: errors.CassException | None = None
        async with self._singles if len(batch) == 1 else self._batches:
            while True:
                try:
                    return await self._attempt(batch)
                except TRANSIENT as error:
                    # An earlier attempt may have had an effect even if the last one was not sent.
                    worst = error if worst is None or not isinstance(error, NOT_SENT) else worst
                    pause_s = backoff.next_s()
                    if loop.time() + pause_s > deadline_s:
                        raise translate(worst, "a write", attempts="repeatedly") from worst
                    self._metrics.count("cassandra_write_retries", reason=type(error).__name__)
                except errors.CassException as error:
                    raise translate(error, "a write", attempts="repeatedly") from error
                await asyncio.sleep(pause_s)

    async def write_once(self, statement: CqlStatement) -> None:
        """Execute one statement without retries, so that the caller gets a failure at once."""
        self._refuse_fork()
        with translated("a write", attempts="repeatedly"):
            async with self._singles:
                await self._attempt([statement])

    async def _attempt(self, batch: Batch) -> None:
        timeout_s = self._settings.write_timeout_s
        if len(batch) == 1:
            [statement] = batch
            prepared = self._prepared.get(statement.cql) or await self._prepare(statement.cql)
            bound = prepared.bind(statement.values, consistency=self._writing, timeout=timeout_s)
            bound.set_is_idempotent(True)
            await _answer(self._session.execute(bound), timeout_s)
            return
        driver_batch = self._new_batch(timeout=timeout_s)
        driver_batch.set_consistency(self._writing)
        driver_batch.set_is_idempotent(True)
        for each in batch:
            prepared = self._prepared.get(each.cql) or await self._prepare(each.cql)
            driver_batch.add_statement(prepared.bind(each.values))
        await _answer(self._session.execute_batch(driver_batch), timeout_s)

    async def compare_and_set(self, cql: str, values: Sequence[Any]) -> dict[str, Any]:
        """Execute a conditional statement once; return `[applied]` and, if that is False, the values found."""
        self._refuse_fork()
        with translated("a compare-and-set", attempts="once"):
            prepared = self._prepared.get(cql) or await self._prepare(cql)
            statement = prepared.bind(
                values, consistency=self._writing, serial_consistency=self._serial,
                timeout=self._settings.write_timeout_s,
            )  # fmt: skip
            statement.set_is_idempotent(False)
            # The default policy retries on the next node if one answers "unavailable": the retry could then find the
            # value of the first attempt and report a conflict.
            statement.set_retry_policy("fallthrough")
            result = await _answer(self._session.execute(statement), self._settings.write_timeout_s)
        answer: dict[str, Any] = result.first().as_dict()
        return answer

    async def define(self, ddl: str, *, address: str | None = None) -> None:
        """Execute DDL and wait for the nodes to agree on it; the driver stops waiting after ten seconds.

        If `address` is given, the node there executes it, or any other one if that node is unreachable.
        """
        self._refuse_fork()
        with translated("a change of the schema", attempts="once"):
            if address is not None:
                statement = acsylla.create_statement(ddl, timeout=SCHEMA_TIMEOUT_S)
                statement.set_host(address, self._settings.port)
                try:
                    await _answer(self._session.execute(statement), SCHEMA_TIMEOUT_S, overdue_s=SCHEMA_OVERDUE_S)
                    return
                except (*NOT_SENT, errors.CassErrorLibNoHostsAvailable):
                    pass
            request = self._session.query(ddl, timeout=SCHEMA_TIMEOUT_S)
            await _answer(request, SCHEMA_TIMEOUT_S, overdue_s=SCHEMA_OVERDUE_S)

    async def query(self, cql: str) -> list[tuple[Any, ...]]:
        """Execute a read without preparing it, and return its rows."""
        self._refuse_fork()
        with translated("a read"):
            timeout_s = self._settings.read_timeout_s
            result = await _answer(self._session.query(cql, timeout=timeout_s), timeout_s)
        return [row.as_tuple() for row in result]

    async def use(self, keyspace: str) -> None:
        """Select the keyspace."""
        self._refuse_fork()
        with translated("selecting the keyspace"):
            await _answer(self._session.use_keyspace(keyspace), self._settings.read_timeout_s)

    async def close(self) -> None:
        """Close the session; a second call does nothing, nor does one in a forked child, where it cannot be closed."""
        if not self._closed and self._generation == generation():
            self._closed = True
            self._prepared.clear()
            await self._session.close()
            self._cluster.destroy()

    async def _prepare(self, cql: str) -> Any:
        if self._closed:
            raise Unavailable("the store is closed: open the book again")
        future = self._preparing.get(cql)
        if future is None:
            timeout_s = self._settings.read_timeout_s
            future = asyncio.ensure_future(_answer(self._session.create_prepared(cql, timeout=timeout_s), timeout_s))
            self._preparing[cql] = future
            future.add_done_callback(lambda done: self._on_prepared(cql, done))
        # Shielded, because other callers may await the same future: cancelling one must not cancel them.
        return await asyncio.shield(future)

    def _on_prepared(self, cql: str, done: asyncio.Future[Any]) -> None:
        del self._preparing[cql]
        if not done.cancelled() and done.exception() is None and not self._closed:
            self._prepared[cql] = done.result()


async def read_rows(
    session: CassandraSession, cql: str, values: Sequence[Any], *, limit: int, decode: Callable[[Any], T]
) -> list[T]:
    """Return the decoded rows of a query that has this LIMIT.

    A node may end a page early, even without rows, so only the absence of further pages means the end. Each row is
    decoded before the next one is read, because the driver's row refers to memory that the next one overwrites.
    """
    page = await session.read(cql, values, page_size=limit)
    found = [decode(row) for row in page]
    while len(found) < limit and page.has_more_pages():
        page = await session.read(cql, values, page_size=limit, page_state=page.page_state())
        found += (decode(row) for row in page)
    return found


def first_column(row: Any) -> Any:
    """Return the first column of a driver's row."""
    return row.column_value_by_index(0)


def all_columns(row: Any) -> tuple[Any, ...]:
    """Return all columns of a driver's row."""
    columns: tuple[Any, ...] = row.as_tuple()
    return columns


async def connect(settings: CassandraSettings, metrics: Metrics) -> CassandraSession:
    """Connect to the cluster. The keyspace is selected later, because it may have to be created."""
    with translated("the settings in [store]"):
        cluster = acsylla.create_cluster(
            list(settings.hosts),
            port=settings.port,
            username=settings.user,
            password=None if settings.user is None else settings.secret() or "",
            connect_timeout=settings.connect_timeout_s,
            resolve_timeout=settings.connect_timeout_s,
            request_timeout=settings.read_timeout_s,
            # The driver's log is global to the process and not safe after its cluster is closed; callers get every
            # error anyway.
            log_level="disabled",
            consistency=settings.reading,
            serial_consistency=settings.serial_consistency,
            constant_reconnect_delay_ms=RECONNECT_MS,
            heartbeat_interval_sec=HEARTBEAT_S,
            idle_timeout_sec=IDLE_S,
            load_balance_dc_aware=settings.local_dc,
            hostname_resolution=settings.verify == "name",
            ssl_enabled=settings.tls,
            ssl_trusted_cert=settings.certificate("ca_file"),
            ssl_cert=settings.certificate("cert_file"),
            ssl_private_key=settings.certificate("key_file"),
            ssl_verify_flags=_VERIFY[settings.verify],
            application_name="tidebook",
        )
    with translated(f"connecting to {', '.join(settings.hosts)} at port {settings.port}"):
        try:
            session = await cluster.create_session()
        except BaseException:
            cluster.destroy()
            raise
    return CassandraSession(cluster, session, settings, metrics)
