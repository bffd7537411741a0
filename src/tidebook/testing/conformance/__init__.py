"""Contracts: one class of cases a port. An adapter's tests subclass it, give one fixture, and are done.

Needs pytest and pytest-asyncio; the rest of `tidebook.testing` does not.
"""

from __future__ import annotations

import pytest

_LOG = ("log", "log_base", "log_topics", "log_writing", "log_reading")
_STORE = ("store", "store_suite", "store_slices", "store_reading")
_JOURNAL = ("base", "appending", "reading", "lives", "racing", "bad_input")
for _cases in _LOG + _STORE + tuple(f"journal_{_part}" for _part in _JOURNAL):
    pytest.register_assert_rewrite(f"{__name__}.{_cases}")
