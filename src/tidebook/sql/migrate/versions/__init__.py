"""An Alembic version location: a branch of its own, labelled `tidebook_outbox`."""
