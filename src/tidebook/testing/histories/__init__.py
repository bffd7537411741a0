"""Histories of operations on a book, and a checker that decides whether they keep Tidebook's promises.

The checker knows the promises and the form of a history, and shares no code with Tidebook: its modules import
only the standard library and msgspec. `python -m tidebook.testing.histories FILE...` checks recorded files.
"""
