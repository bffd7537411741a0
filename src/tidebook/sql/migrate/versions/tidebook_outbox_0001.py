"""The outbox's tables: kafka_messages, kafka_topic_info and those beside them."""

from __future__ import annotations

from alembic import op

from tidebook.sql.migrate.outbox import create_statements, drop_statements
from tidebook.sql.port.dialect import dialect

revision = "tidebook_outbox_0001"
down_revision = None
branch_labels = ("tidebook_outbox",)
depends_on = None


def upgrade() -> None:
    """Make the tables."""
    for statement in create_statements(dialect(op.get_context().dialect.name)):
        op.execute(statement)


def downgrade() -> None:
    """Remove the tables, and what waits in them."""
    for statement in drop_statements(dialect(op.get_context().dialect.name)):
        op.execute(statement)
