"""Creating the tables with Alembic and with plain SQL."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy
from alembic import command
from alembic.config import Config

from tests.integration.outbox.conftest import EVERY_DATABASE
from tests.integration.outbox.databases import Database
from tidebook import outbox
from tidebook.outbox.migrations.tables import create_statements, drop_statements, script
from tidebook.outbox.sql import dialect

every_database = pytest.mark.parametrize("empty_database", EVERY_DATABASE, indirect=True)

ENVIRONMENT = """\
from alembic import context
from sqlalchemy import create_engine

engine = create_engine(context.config.get_main_option("sqlalchemy.url"))
with engine.connect() as connection:
    context.configure(connection=connection)
    with context.begin_transaction():
        context.run_migrations()
engine.dispose()
"""


def tables(database: Database) -> set[str]:
    with database.engine() as engine:
        return {name for name in sqlalchemy.inspect(engine).get_table_names() if name.startswith("kafka_")}


@every_database
def test_alembic_creates_and_removes_the_tables(empty_database: Database, tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text(ENVIRONMENT)
    config = Config()
    config.set_main_option("script_location", str(tmp_path))
    config.set_main_option("path_separator", "space")
    config.set_main_option("version_locations", "tidebook.outbox.migrations:versions")
    config.set_main_option("sqlalchemy.url", empty_database.sqlalchemy_url())
    command.upgrade(config, "tidebook_outbox@head")
    assert {"kafka_messages", "kafka_topic_info", "kafka_topic_offset", "kafka_parked"} <= tables(empty_database)
    with empty_database.connect() as connection:
        outbox.publish(connection, topic="orders", payload=b"x")
        connection.commit()
    assert empty_database.waiting() == 1
    command.downgrade(config, "tidebook_outbox@base")
    assert tables(empty_database) == set()


@every_database
def test_the_printed_script_matches_what_the_library_runs(empty_database: Database) -> None:
    kind = dialect(empty_database.kind)
    assert script(kind).split(";\n\n")[:-1] == list(create_statements(kind))
    for statement in create_statements(kind):
        empty_database.query(statement)
    assert "kafka_messages" in tables(empty_database)
    for statement in drop_statements(kind):
        empty_database.query(statement)
    assert tables(empty_database) == set()
