"""The driver, kept thin: connect, prepare, execute, and one translation of every failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import acsylla
from acsylla import errors

from tidebook.core.errors import Unavailable
from tidebook.core.metrics import Metrics
from tidebook.core.settle import give_up
from tidebook.store.cassandra.failures import NOT_SENT, PASSING, translate, translated
from tidebook.store.cassandra.mutations import Batch, Statement
from tidebook.store.cassandra.settings import CassandraSettings

RECONNECT_MS: Final = 250
RETRY_FIRST_S: Final = 0.05
RETRY_MAX_S: Final = 1.0
#: A connection on which nothing comes back for this long is given up.
HEARTBEAT_S: Final = 5
IDLE_S: Final = 15
SCHEMA_TIMEOUT_S: Final = 60
#: Reads and changes of one setting that meet hold each other up, and then time out long before a node is down.
SERIAL_ATTEMPTS: Final = 5
#: Single rows in flight for each batch that may be: 128 batches, or 256 rows, keep one node busy and not overloaded.
SINGLES_PER_BATCH: Final = 2

_VERIFY: Final = {
    "certificate": acsylla.SSLVerifyFlags.PEER_CERT,
    "address": acsylla.SSLVerifyFlags.PEER_IDENTITY,
    "name": acsylla.SSLVerifyFlags.PEER_IDENTITY_DNS,
}


class Session:
    """Prepared statements on one cluster, for the event loop that opened it."""

    def __init__(self, cluster: Any, session: Any, settings: CassandraSettings, metrics: Metrics) -> None:
        self._cluster = cluster
        self._session = session
        self._settings = settings
        self._metrics = metrics
        self._prepared: dict[str, Any] = {}
        self._preparing: dict[str, asyncio.Future[Any]] = {}
        self._batches = asyncio.Semaphore(settings.in_flight_max)
        self._singles = asyncio.Semaphore(settings.in_flight_max * SINGLES_PER_BATCH)
        self._reading = acsylla.Consistency[settings.reading]
        self._writing = acsylla.Consistency[settings.writing]
        self._closed = False
        self._serial = acsylla.Consistency[settings.serial_consistency]

    async def read(
        self, cql: str, values: Sequence[Any], *, page_size: int = 5000, page_state: bytes | None = None
    ) -> Any:
        """One page of rows, at the reading level."""
        return await self._select(cql, values, page_size, page_state, self._reading)

    async def read_serial(self, cql: str, values: Sequence[Any]) -> Any:
        """Rows of a compare-and-set table as of now; an unfinished change is finished or lost first."""
        for attempt in range(SERIAL_ATTEMPTS):
            try:
                return await self._select(cql, values, 5000, None, self._serial)
            except Unavailable as error:
                contended = isinstance(error.__cause__, errors.CassErrorServerReadTimeout)
                if not contended or attempt + 1 == SERIAL_ATTEMPTS:
                    raise
            await asyncio.sleep(RETRY_FIRST_S * 2**attempt)

    async def pages(self, cql: str, values: Sequence[Any], *, page_size: int) -> AsyncIterator[Any]:
        """All pages of a query, the next one asked for while one is used."""
        ahead: asyncio.Task[Any] | None = None
        page = await self.read(cql, values, page_size=page_size)
        try:
            while page.has_more_pages():
                ahead = asyncio.ensure_future(self.read(cql, values, page_size=page_size, page_state=page.page_state()))
                yield page
                page = await ahead
            yield page
        finally:
            if ahead is not None:
                give_up(ahead)

    async def _select(
        self, cql: str, values: Sequence[Any], page_size: int, page_state: bytes | None, level: Any
    ) -> Any:
        with translated("a read"):
            prepared = self._prepared.get(cql) or await self._prepare(cql)
            statement = prepared.bind(
                values, page_size=page_size, page_state=page_state, consistency=level,
                timeout=self._settings.read_timeout_s,
            )  # fmt: skip
            statement.set_is_idempotent(True)
            began = time.perf_counter()
            result = await self._session.execute(statement)
        self._metrics.time("cassandra_read", time.perf_counter() - began)
        return result

    async def write(self, batch: Batch) -> None:
        """Carry out one batch, again and again until it is acknowledged or the deadline has passed.

        Harmless, because what a slice writes has a stamp of its own; and necessary, because a write that timed out
        may have reached too few replicas to be seen.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._settings.write_deadline_s
        pause_s = RETRY_FIRST_S
        told: errors.CassException | None = None
        async with self._singles if len(batch) == 1 else self._batches:
            while True:
                try:
                    return await self._attempt(batch)
                except PASSING as error:
                    # An earlier attempt may have had an effect, though the last one was not even sent.
                    told = error if told is None or not isinstance(error, NOT_SENT) else told
                    if loop.time() + pause_s > give_up:
                        raise translate(told, "a write", wrote="repeatedly") from told
                    self._metrics.count("cassandra_write_retries", reason=type(error).__name__)
                except errors.CassException as error:
                    raise translate(error, "a write", wrote="repeatedly") from error
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, RETRY_MAX_S)

    async def write_once(self, statement: Statement) -> None:
        """Carry out one statement, with one attempt: its caller hears of a failure at once."""
        with translated("a write", wrote="repeatedly"):
            async with self._singles:
                await self._attempt([statement])

    async def _attempt(self, batch: Batch) -> None:
        if len(batch) == 1:
            await self._session.execute(await self._bound(batch[0]))
            return
        together = acsylla.create_batch_unlogged(timeout=self._settings.write_timeout_s)
        together.set_consistency(self._writing)
        together.set_is_idempotent(True)
        for each in batch:
            prepared = self._prepared.get(each.cql) or await self._prepare(each.cql)
            together.add_statement(prepared.bind(each.values))
        await self._session.execute_batch(together)

    async def _bound(self, statement: Statement) -> Any:
        prepared = self._prepared.get(statement.cql) or await self._prepare(statement.cql)
        bound = prepared.bind(statement.values, consistency=self._writing, timeout=self._settings.write_timeout_s)
        bound.set_is_idempotent(True)
        return bound

    async def compare_and_set(self, cql: str, values: Sequence[Any]) -> dict[str, Any]:
        """A conditional statement's answer: `[applied]`, and where it is False what was found. Never sent twice."""
        with translated("a compare-and-set", wrote="once"):
            prepared = self._prepared.get(cql) or await self._prepare(cql)
            statement = prepared.bind(
                values, consistency=self._writing, serial_consistency=self._serial,
                timeout=self._settings.write_timeout_s,
            )  # fmt: skip
            statement.set_is_idempotent(False)
            # By default what a node answers as unavailable goes to the next one, and would find its own value there.
            statement.set_retry_policy("fallthrough")
            result = await self._session.execute(statement)
        told: dict[str, Any] = result.first().as_dict()
        return told

    async def define(self, ddl: str) -> None:
        """Carry out DDL, and return when the nodes agree on it."""
        with translated("a change of the schema", wrote="once"):
            await self._session.query(ddl, timeout=SCHEMA_TIMEOUT_S)

    async def query(self, cql: str) -> list[tuple[Any, ...]]:
        """A read that is not worth preparing."""
        with translated("a read"):
            result = await self._session.query(cql, timeout=self._settings.read_timeout_s)
        return [row.as_tuple() for row in result]

    async def use(self, keyspace: str) -> None:
        """Names without a keyspace mean this one from now on."""
        with translated("choosing the keyspace"):
            await self._session.use_keyspace(keyspace)

    async def close(self) -> None:
        """Let go of the cluster; a second time does nothing."""
        if not self._closed:
            self._closed = True
            self._prepared.clear()
            await self._session.close()
            self._cluster.destroy()

    async def _prepare(self, cql: str) -> Any:
        if self._closed:
            raise Unavailable("the store is closed: open the book again")
        future = self._preparing.get(cql)
        if future is None:
            future = asyncio.ensure_future(self._session.create_prepared(cql, timeout=self._settings.read_timeout_s))
            self._preparing[cql] = future
            future.add_done_callback(lambda done: self._on_prepared(cql, done))
        # Shielded: others wait for the same statement, and one of them giving up is not their concern.
        return await asyncio.shield(future)

    def _on_prepared(self, cql: str, done: asyncio.Future[Any]) -> None:
        del self._preparing[cql]
        if not done.cancelled() and done.exception() is None and not self._closed:
            self._prepared[cql] = done.result()


async def connect(settings: CassandraSettings, metrics: Metrics) -> Session:
    """Reach the cluster; which keyspace is chosen later, for it may have to be made."""
    with translated("the settings in [store]"):
        cluster = acsylla.create_cluster(
            list(settings.hosts),
            port=settings.port,
            username=settings.user,
            password=None if settings.user is None else settings.secret() or "",
            connect_timeout=settings.connect_timeout_s,
            resolve_timeout=settings.connect_timeout_s,
            request_timeout=settings.read_timeout_s,
            # One log for the whole process, which outlives no cluster safely; each failure reaches its caller anyway.
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
    return Session(cluster, session, settings, metrics)
