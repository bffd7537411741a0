"""Publishing with Django's connection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import django
import pymysql
import pytest
from django.conf import settings

from tests.integration.outbox.conftest import EVERY_DATABASE
from tests.integration.outbox.databases import Database, mysql_parameters
from tidebook import outbox
from tidebook.core.errors import InvalidInput

every_database = pytest.mark.parametrize("empty_database", EVERY_DATABASE, indirect=True)
#: The mysqlclient version that Django requires; pymysql, which replaces it here, reports an older one.
MYSQLCLIENT = (2, 2, 1, "final", 0)


@pytest.fixture
def connection(database: Database) -> Iterator[Any]:
    if not settings.configured:
        settings.configure(DATABASES={}, USE_TZ=True)
        django.setup()
    from django.db import connections

    if database.kind == "sqlite":
        config = {"ENGINE": "django.db.backends.sqlite3", "NAME": database.url.removeprefix("sqlite:///")}
    else:
        engine = {"postgresql": "postgresql", "mysql": "mysql"}[database.kind]
        parts = mysql_parameters(database.url)
        config = {"ENGINE": f"django.db.backends.{engine}", "NAME": parts["database"], "USER": parts["user"]}
        config |= {"PASSWORD": parts["password"], "HOST": parts["host"], "PORT": str(parts["port"])}
        if engine == "mysql":
            pymysql.version_info = MYSQLCLIENT
            pymysql.install_as_MySQLdb()
    connections.settings["outbox"] = connections.configure_settings({"default": config})["default"]
    yield connections["outbox"]
    connections["outbox"].close()
    del connections["outbox"], connections.settings["outbox"]


@every_database
def test_django_publishes_inside_atomic(database: Database, connection: Any) -> None:
    from django.db import transaction

    with transaction.atomic(using="outbox"):
        outbox.publish(connection, topic="orders", key=b"1", payload=b"100%", headers={"kind": b"paid"})
    with transaction.atomic(using="outbox"):
        outbox.publish(connection, topic="orders", payload=b"gone")
        transaction.set_rollback(True, using="outbox")
    assert database.query("SELECT payload FROM kafka_messages") == [(b"100%",)]


@every_database
def test_django_outside_of_a_transaction_is_refused(database: Database, connection: Any) -> None:
    with pytest.raises(InvalidInput, match="atomic"):
        outbox.publish(connection, topic="orders", payload=b"x")


@every_database
def test_django_without_autocommit_publishes_at_its_own_commit(database: Database, connection: Any) -> None:
    connection.set_autocommit(False)
    outbox.publish_list(connection, [outbox.Message("orders", b"%s\x00\xff", key=b"'") for _ in range(3)])
    assert database.waiting() == 0
    connection.commit()
    assert database.query("SELECT payload FROM kafka_messages") == [(b"%s\x00\xff",)] * 3


@every_database
def test_django_keeps_the_order_of_a_key_if_requested(database: Database, connection: Any) -> None:
    from django.db import transaction

    with transaction.atomic(using="outbox"):
        outbox.publish(connection, topic="orders", key=b"k", payload=b"1", ordered=True)
    assert database.waiting() == 1


@every_database
def test_a_savepoint_of_django_that_is_rolled_back_publishes_nothing(database: Database, connection: Any) -> None:
    from django.db import transaction

    with transaction.atomic(using="outbox"):
        outbox.publish(connection, topic="orders", payload=b"kept")
        with transaction.atomic(using="outbox"):
            outbox.publish(connection, topic="orders", payload=b"gone")
            transaction.set_rollback(True, using="outbox")
    assert database.query("SELECT payload FROM kafka_messages") == [(b"kept",)]
