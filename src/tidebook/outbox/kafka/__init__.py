"""Kafka as the target of the outbox's relay, and as a direct backend of `publish`."""
