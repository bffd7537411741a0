"""Create the outbox's tables."""

from __future__ import annotations

from alembic import op

from tidebook.outbox.migrations.tables import create_statements, drop_statements
from tidebook.outbox.sql import dialect

revision = "tidebook_outbox_0001"
down_revision = None
branch_labels = ("tidebook_outbox",)
depends_on = None


def upgrade() -> None:
    """Create the tables."""
    for statement in create_statements(dialect(op.get_context().dialect.name)):
        op.execute(statement)


def downgrade() -> None:
    """Drop the tables and all waiting messages."""
    for statement in drop_statements(dialect(op.get_context().dialect.name)):
        op.execute(statement)
