"""Journals as the target of the outbox's relay."""
