"""Plant a fault in a function by replacing a part of its source, and expect the simulation to find it."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import pytest


def assert_found(violations: Callable[[int], Sequence[str]], seeds: Sequence[int]) -> None:
    """Assert that some seed finds the fault: it has violations, or the mutant raises."""
    for seed in seeds:
        try:
            if violations(seed):
                return
        except Exception:
            return
    raise AssertionError(f"not found with {len(seeds)} seeds")


def assert_reduced(explained: str) -> None:
    """Assert that the explanation of a failing seed has fewer choices, and still a violation."""
    found = re.match(r"seed \d+, (\d+) of (\d+) choices:\n", explained)
    assert found is not None
    assert int(found[1]) < int(found[2])
    assert explained[found.end() :].strip()


def plant(monkeypatch: pytest.MonkeyPatch, owner: ModuleType | type, name: str, old: str, new: str) -> None:
    """Replace `owner.name`, a function or a method, and every import of it in tidebook, by its mutant."""
    function: Any = inspect.getattr_static(owner, name)
    original = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(original))
    if source.count(old) != 1:
        raise ValueError(f"{old!r} occurs {source.count(old)} times in {name}")
    namespace: dict[str, Any] = {}
    # Annotations must not be evaluated, as in the original module.
    code = compile("from __future__ import annotations\n" + source.replace(old, new), f"<mutant of {name}>", "exec")
    exec(code, original.__globals__, namespace)
    mutant = namespace[name]
    assert isinstance(mutant, FunctionType)
    monkeypatch.setattr(owner, name, mutant)
    if isinstance(owner, ModuleType):
        for module in [each for key, each in sys.modules.items() if key.startswith("tidebook.")]:
            if getattr(module, name, None) is function:
                monkeypatch.setattr(module, name, mutant)
