"""Copies what other systems have stored into a book; a run may be repeated, and copies only what is missing."""
