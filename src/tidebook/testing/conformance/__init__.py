"""Conformance suites: one class of test cases for each port; an adapter's tests subclass it and provide fixtures.

Needs pytest and pytest-asyncio; the rest of `tidebook.testing` does not.
"""

from __future__ import annotations

from pkgutil import iter_modules

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in iter_modules(__path__)))
