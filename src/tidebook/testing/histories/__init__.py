"""Histories of operations on a book, and a checker that decides whether they keep Tidebook's promises.

The checker shares no code with the rest of Tidebook, so that a mistake there cannot hide itself: these modules import
only the standard library and msgspec. `python -m tidebook.testing.histories FILE...` checks recorded files.
"""
