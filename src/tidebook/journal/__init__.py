"""Event journals: append, read, delete and purge over a log and a store."""
