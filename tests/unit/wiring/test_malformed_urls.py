"""A malformed URL is bad input, and its error does not show the password in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tidebook.core.errors import InvalidInput
from tidebook.outbox.mysql import connect_parameters
from tidebook.postgres.connect import connect_options
from tidebook.remote.connection import Connection
from tidebook.wiring.adapters import kafka_settings, server_settings
from tidebook.wiring.settings import Section, Settings


def read_kafka(url: str) -> object:
    return kafka_settings(Settings(Path(), {"log": Section(url)}))


def read_cassandra(url: str) -> object:
    settings = Settings(Path(), {"store": Section(url)})
    return server_settings(settings, "store", "cassandra", "tidebook.store.cassandra.settings", "CassandraSettings")


def read_postgres(url: str) -> object:
    return connect_options(url, "test")


READERS: dict[str, Callable[[str], object]] = {
    "kafka": read_kafka,
    "cassandra": read_cassandra,
    "postgresql": read_postgres,
    "mysql": connect_parameters,
    "https": Connection,
}


#: libpq reports other faults than the first one when it connects.
MALFORMED = ("me:hunter2@[::1", "me:hunter2@host:port/shop", "me:hunter2\uff20host:1/shop")
CASES = [(scheme, rest) for scheme in READERS for rest in (MALFORMED[:1] if scheme == "postgresql" else MALFORMED)]


@pytest.mark.parametrize(("scheme", "rest"), CASES, ids=ascii)
def test_a_malformed_url_is_refused_without_its_password(scheme: str, rest: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        READERS[scheme](f"{scheme}://{rest}")
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in str(caught.value.__cause__)


@pytest.mark.parametrize("url", ["http://host:99999", "http://\udcff", "http://[::1"], ids=ascii)
def test_a_malformed_address_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="the address of a server"):
        Connection(url)


@pytest.mark.parametrize("token", ["é", "a\nb", "a b", "\udcff"], ids=ascii)
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(InvalidInput, match="'tidebook token create' printed") as caught:
        Connection("http://host", token=token)
    assert token not in str(caught.value)
