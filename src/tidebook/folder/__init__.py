"""A folder on one machine, shared by processes: SQLite files, one writer thread each, a fair lock, wake-ups."""
