"""Imports of data from other systems into a book; a run may be repeated, and copies only data that is missing."""
