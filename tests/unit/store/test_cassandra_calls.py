"""The adapter's calls of the driver other than prepared reads and writes, and how it is closed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import acsylla
import pytest
from acsylla import errors

from tidebook.core.errors import Corrupt, InvalidInput, OutcomeUnknown, Unavailable
from tidebook.runtime.metrics import Metrics
from tidebook.store.cassandra import session as sessions
from tidebook.store.cassandra.session import (
    SCHEMA_TIMEOUT_S,
    SERIAL_ATTEMPTS,
    CassandraSession,
    all_columns,
    connect,
    read_rows,
)
from tidebook.store.cassandra.settings import CassandraSettings

SETTINGS = CassandraSettings.read("cassandra://one/books", environment={})


class Row:
    def __init__(self, *values: Any) -> None:
        self._values = values

    def as_tuple(self) -> tuple[Any, ...]:
        return self._values


class Page(list[Row]):
    def __init__(self, rows: list[Row], state: bytes | None = None) -> None:
        super().__init__(rows)
        self._state = state

    def has_more_pages(self) -> bool:
        return self._state is not None

    def page_state(self) -> bytes | None:
        return self._state


class Driver:
    """A fake of the driver's cluster, session and prepared statement: it answers from a list and records calls."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[Any, ...]] = []

    def _answer(self) -> Any:
        answer = self.answers.pop(0) if self.answers else Page([])
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def create_prepared(self, cql: str, timeout: float) -> Driver:
        self.calls.append(("prepare", cql, timeout))
        if self.answers and isinstance(self.answers[0], errors.CassErrorLibRequestTimedOut):
            raise self.answers.pop(0)
        return self

    def bind(self, values: Any, **options: Any) -> Driver:
        self.calls.append(("bind", values, options))
        return self

    def set_is_idempotent(self, idempotent: bool) -> None:
        self.calls.append(("idempotent", idempotent))

    async def execute(self, statement: Any) -> Any:
        self.calls.append(("execute",))
        return self._answer()

    async def query(self, text: str, timeout: float) -> Any:
        self.calls.append(("query", text, timeout))
        return self._answer()

    async def use_keyspace(self, keyspace: str) -> None:
        self.calls.append(("use", keyspace))

    async def close(self) -> None:
        self.calls.append(("close",))

    def destroy(self) -> None:
        self.calls.append(("destroy",))

    def names(self) -> list[Any]:
        return [call[0] for call in self.calls]


def session_of(driver: Driver) -> CassandraSession:
    return CassandraSession(driver, driver, SETTINGS, Metrics())


async def test_a_session_is_closed_once_and_prepares_nothing_afterwards() -> None:
    driver = Driver()
    session = session_of(driver)
    await session.read("SELECT 1", [])
    await session.close()
    await session.close()
    assert driver.names()[-2:] == ["close", "destroy"]
    assert driver.names().count("close") == 1
    with pytest.raises(Unavailable, match="closed"):
        await session.read("SELECT 1", [])


async def test_a_statement_is_prepared_once_unless_that_failed() -> None:
    driver = Driver(errors.CassErrorLibRequestTimedOut("no answer"))
    session = session_of(driver)
    with pytest.raises(Unavailable):
        await session.read("SELECT 1", [])
    for _ in range(3):
        await session.read("SELECT 1", [])
    prepared = [call for call in driver.calls if call[0] == "prepare"]
    assert prepared == [("prepare", "SELECT 1", SETTINGS.read_timeout_s)] * 2
    await session.read("SELECT 2", [])
    assert driver.names().count("prepare") == 3


async def test_rows_of_a_query_are_tuples_and_a_keyspace_is_chosen() -> None:
    driver = Driver(Page([Row(1, "a"), Row(2, "b")]))
    session = session_of(driver)
    assert await session.query("SELECT x") == [(1, "a"), (2, "b")]
    await session.use("books")
    assert driver.calls == [("query", "SELECT x", SETTINGS.read_timeout_s), ("use", "books")]


async def test_all_pages_are_returned_in_order_each_with_the_state_of_the_previous_one() -> None:
    pages = [Page([Row(1)], b"one"), Page([Row(2)], b"two"), Page([Row(3)])]
    driver = Driver(*pages)
    found = [page async for page in session_of(driver).pages("SELECT", ["v"], page_size=7)]
    assert found == pages
    options = [call[2] for call in driver.calls if call[0] == "bind"]
    assert [(each["page_size"], each["page_state"]) for each in options] == [(7, None), (7, b"one"), (7, b"two")]


async def test_rows_are_read_to_the_limit_although_pages_end_early() -> None:
    one, two = Row(1), Row(2)
    driver = Driver(Page([], b"none yet"), Page([one], b"one"), Page([two], b"more than the limit"))
    assert await read_rows(session_of(driver), "SELECT", ["v"], limit=2, decode=all_columns) == [(1,), (2,)]
    options = [call[2] for call in driver.calls if call[0] == "bind"]
    assert [(each["page_size"], each["page_state"]) for each in options] == [(2, None), (2, b"none yet"), (2, b"one")]
    assert await read_rows(session_of(Driver(Page([one]))), "SELECT", ["v"], limit=2, decode=all_columns) == [(1,)]


async def test_a_contended_serial_read_is_repeated_and_any_other_failure_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "RETRY_FIRST_S", 0.0)
    monkeypatch.setattr(sessions, "RETRY_MAX_S", 0.0)
    # A read that has to complete another client's compare-and-set fails like a write.
    kinds = [errors.CassErrorServerReadTimeout, errors.CassErrorServerWriteTimeout]
    contended = [kinds[number % 2]("contended") for number in range(SERIAL_ATTEMPTS)]
    driver = Driver(*contended[1:], Page([Row(1)]))
    assert [row.as_tuple() for row in await session_of(driver).read_serial("SELECT", [])] == [(1,)]
    assert driver.names().count("execute") == SERIAL_ATTEMPTS
    driver = Driver(*contended)
    with pytest.raises(Unavailable):
        await session_of(driver).read_serial("SELECT", [])
    assert driver.names().count("execute") == SERIAL_ATTEMPTS
    driver = Driver(errors.CassErrorServerUnavailable("down"))
    with pytest.raises(Unavailable):
        await session_of(driver).read_serial("SELECT", [])
    assert driver.names().count("execute") == 1


async def test_ddl_is_sent_to_the_given_node_or_to_any_if_that_one_is_not_reachable() -> None:
    driver = Driver()
    await session_of(driver).define("CREATE")
    assert driver.calls == [("query", "CREATE", SCHEMA_TIMEOUT_S)]
    driver = Driver()
    await session_of(driver).define("CREATE", address="127.0.0.1")
    assert driver.names() == ["execute"]
    driver = Driver(errors.CassErrorLibNoHostsAvailable("it is down"))
    await session_of(driver).define("CREATE", address="127.0.0.1")
    assert driver.names() == ["execute", "query"]
    driver = Driver(errors.CassErrorLibRequestTimedOut("no answer"))
    with pytest.raises(OutcomeUnknown):
        await session_of(driver).define("CREATE", address="127.0.0.1")
    assert driver.names() == ["execute"]


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (errors.CassErrorServerBadCredentials("no"), InvalidInput, "check user and password"),
        (errors.CassErrorServerUnauthorized("no"), InvalidInput, "check user and password"),
        (errors.CassErrorServerSyntaxError("no"), Corrupt, "did another program change the keyspace"),
        (errors.CassErrorSslInvalidPeerCert("no"), InvalidInput, "certificate"),
        (errors.CassErrorLibNoHostsAvailable("Bad credentials"), InvalidInput, "check user and password"),
        (errors.CassErrorLibNoHostsAvailable("no"), Unavailable, "then retry"),
    ],
)
async def test_errors_of_the_driver_are_translated_into_errors_that_say_what_to_do(
    error: errors.CassException, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text) as caught:
        await session_of(Driver(error)).read("SELECT", [])
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("user", [None, "me"])
async def test_a_connection_uses_the_settings_and_is_closed_if_it_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, user: str | None
) -> None:
    given: dict[str, Any] = {}

    class Cluster(Driver):
        async def create_session(self) -> Any:
            return self._answer()

    cluster = Cluster("session", errors.CassErrorLibNoHostsAvailable("down"))

    def create_cluster(hosts: list[str], **options: Any) -> Cluster:
        given.update(options, hosts=hosts)
        return cluster

    monkeypatch.setattr(acsylla, "create_cluster", create_cluster)
    (tmp_path / "ca.pem").write_text("authority")
    options: dict[str, Any] = {"tls": True, "ca_file": str(tmp_path / "ca.pem"), "verify": "name", "local_dc": "dc1"}
    if user is not None:
        options |= {"user": user, "password": "secret"}
    settings = CassandraSettings.read("cassandra://one,two:9043/books", options, environment={})
    session = await connect(settings, Metrics())
    assert isinstance(session, CassandraSession)
    assert (given["hosts"], given["port"]) == (["one", "two"], 9043)
    assert (given["username"], given["password"]) == (user, None if user is None else "secret")
    assert (given["ssl_enabled"], given["ssl_trusted_cert"], given["ssl_cert"]) == (True, "authority", None)
    assert (given["hostname_resolution"], given["ssl_verify_flags"]) == (True, acsylla.SSLVerifyFlags.PEER_IDENTITY_DNS)
    assert given["load_balance_dc_aware"] == "dc1"
    with pytest.raises(Unavailable, match="connecting to one, two at port 9043"):
        await connect(settings, Metrics())
    assert cluster.names() == ["destroy"]
    cluster.answers.append("session")
    await connect(SETTINGS, Metrics())
    assert (given["hostname_resolution"], given["ssl_enabled"]) == (False, False)
