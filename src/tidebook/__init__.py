"""Tidebook: durable journals for Python services."""
