"""A Cassandra that requires TLS and a password accepts only clients with both, and no error reveals a secret."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tidebook.core.errors import InvalidInput, TidebookError, Unavailable
from tidebook.runtime.metrics import Metrics
from tidebook.store.cassandra import CassandraSettings, open_cassandra_store
from tidebook.store.cassandra.settings import PASSWORD_VARIABLE
from tidebook.testing.servers import Cassandra, Security, make_security

pytestmark = [pytest.mark.cassandra, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def security(tmp_path_factory: pytest.TempPathFactory) -> Security:
    return make_security(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, security: Security) -> Iterator[Cassandra]:
    with Cassandra(tmp_path_factory.mktemp("cassandra") / "node", security=security).temporarily() as server:
        yield server


@pytest.fixture
def options(security: Security) -> dict[str, Any]:
    """Return the settings of a client that the server accepts."""
    return {
        "user": security.credentials.user,
        "password": security.credentials.password,
        "tls": True,
        "ca_file": str(security.certificates.authority),
    }


async def check_client_works(
    server: Cassandra, options: dict[str, Any], environment: dict[str, str] | None = None
) -> None:
    settings = CassandraSettings.read(f"cassandra://{server.address}/guarded", options, environment=environment or {})
    store = await open_cassandra_store(settings, metrics=Metrics())
    await store.set_setting("a", "1", expected=None)
    assert await store.setting("a") == "1"
    await store.close()


async def check_client_is_refused(server: Cassandra, options: dict[str, Any], secret: str) -> TidebookError:
    with pytest.raises((InvalidInput, Unavailable)) as reported:
        await check_client_works(server, options)
    chain: BaseException | None = reported.value
    while chain is not None:
        assert secret not in f"{chain!r} {chain}"
        chain = chain.__cause__
    return reported.value


async def test_the_right_password_over_tls_is_accepted(server: Cassandra, options: dict[str, Any]) -> None:
    await check_client_works(server, options)


@pytest.mark.parametrize("verify", ["certificate", "address", "name"])
async def test_the_certificate_is_checked_as_far_as_configured(
    server: Cassandra, options: dict[str, Any], verify: str
) -> None:
    if verify == "name" and socket.gethostbyaddr("127.0.0.1")[0] != "localhost":
        pytest.skip("the name of 127.0.0.1 is not localhost on this machine")
    await check_client_works(server, {**options, "verify": verify})


async def test_a_password_may_come_from_a_file_or_the_environment(
    server: Cassandra, options: dict[str, Any], tmp_path: Path
) -> None:
    password = options.pop("password")
    (tmp_path / "password").write_text(f"{password}\n")
    await check_client_works(server, {**options, "password_file": str(tmp_path / "password")})
    await check_client_works(server, options, {PASSWORD_VARIABLE: password})


async def test_a_wrong_password_is_refused(
    server: Cassandra, options: dict[str, Any], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    error = await check_client_is_refused(server, {**options, "password": "wrong-and-secret"}, "wrong-and-secret")
    assert isinstance(error, InvalidInput)
    assert "password" in str(error)
    await check_client_works(server, options)
    written = f"{caplog.text} {capfd.readouterr()}"  # the driver itself writes to the terminal
    assert "wrong-and-secret" not in written
    assert options["password"] not in written


async def test_no_password_is_refused(server: Cassandra, options: dict[str, Any]) -> None:
    await check_client_is_refused(server, {"tls": True, "ca_file": options["ca_file"]}, options["password"])


async def test_a_connection_without_tls_is_refused(server: Cassandra, options: dict[str, Any]) -> None:
    await check_client_is_refused(
        server, {"user": options["user"], "password": options["password"]}, options["password"]
    )


async def test_a_certificate_of_an_untrusted_authority_is_refused(
    server: Cassandra, options: dict[str, Any], security: Security
) -> None:
    await check_client_is_refused(
        server, {**options, "ca_file": str(security.certificates.stranger)}, options["password"]
    )


async def test_a_certificate_file_without_a_certificate_is_reported(
    server: Cassandra, options: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "none.pem").write_text("no certificate")
    for file in ("none.pem", "missing.pem"):
        error = await check_client_is_refused(server, {**options, "ca_file": str(tmp_path / file)}, options["password"])
        assert isinstance(error, InvalidInput)
