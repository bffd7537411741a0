"""The outbox on PostgreSQL, with psycopg."""
