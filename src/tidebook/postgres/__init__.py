"""Connections to PostgreSQL with psycopg, and its errors."""
