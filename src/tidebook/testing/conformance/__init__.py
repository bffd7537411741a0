"""Conformance suites: one class of test cases for each port; an adapter's tests subclass it and provide a fixture.

Needs pytest and pytest-asyncio; the rest of `tidebook.testing` does not.
"""

from __future__ import annotations

import pytest

_LOG = ("log", "log_base", "log_topics", "log_writing", "log_reading")
_STORE = ("store", "store_suite", "store_slices", "store_reading")
_JOURNAL = ("base", "appending", "reading", "lifecycle", "racing", "bad_input")
for _cases in _LOG + _STORE + tuple(f"journal_{_part}" for _part in _JOURNAL):
    pytest.register_assert_rewrite(f"{__name__}.{_cases}")
