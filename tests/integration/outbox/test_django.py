"""Django's connection, as its users have it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import django
import pytest
from django.conf import settings

from tests.integration.outbox.conftest import EVERY_DATABASE
from tests.integration.outbox.databases import Database, mysql_parameters
from tidebook import outbox
from tidebook.core.errors import InvalidInput

without_mysql = [each for each in EVERY_DATABASE if each.values != ("mysql",)]


@pytest.fixture
def connection(database: Database) -> Iterator[Any]:
    if not settings.configured:
        settings.configure(DATABASES={}, USE_TZ=True)
        django.setup()
    from django.db import connections

    if database.kind == "sqlite":
        config = {"ENGINE": "django.db.backends.sqlite3", "NAME": database.url.removeprefix("sqlite:///")}
    else:
        parts = mysql_parameters(database.url)
        config = {"ENGINE": "django.db.backends.postgresql", "NAME": parts["database"], "USER": parts["user"]}
        config |= {"HOST": parts["host"], "PORT": str(parts["port"])}
    connections.settings["outbox"] = connections.configure_settings({"default": config})["default"]
    yield connections["outbox"]
    connections["outbox"].close()
    del connections["outbox"], connections.settings["outbox"]


@pytest.mark.parametrize("empty_database", without_mysql, indirect=True)
def test_django_publishes_inside_atomic(database: Database, connection: Any) -> None:
    from django.db import transaction

    with transaction.atomic(using="outbox"):
        outbox.publish(connection, topic="orders", key=b"1", payload=b"100%", headers={"kind": b"paid"})
    with transaction.atomic(using="outbox"):
        outbox.publish(connection, topic="orders", payload=b"gone")
        transaction.set_rollback(True, using="outbox")
    assert database.query("SELECT payload FROM kafka_messages") == [(b"100%",)]


@pytest.mark.parametrize("empty_database", without_mysql, indirect=True)
def test_django_outside_of_a_transaction_is_refused(database: Database, connection: Any) -> None:
    with pytest.raises(InvalidInput, match="atomic"):
        outbox.publish(connection, topic="orders", payload=b"x")
