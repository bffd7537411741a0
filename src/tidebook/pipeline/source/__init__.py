"""Spark data sources that read a book's log and store."""
