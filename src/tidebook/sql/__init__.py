"""The SQL port of outbox and queue, with its adapters beside it."""
