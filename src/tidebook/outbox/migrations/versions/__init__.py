"""An Alembic version location, with the branch label `tidebook_outbox`."""
