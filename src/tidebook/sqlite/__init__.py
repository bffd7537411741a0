"""SQLite files in a folder that processes of one machine share: one writer thread per file, a fair lock, wake-ups."""
