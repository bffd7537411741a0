"""SQLite, in the files of a folder."""
