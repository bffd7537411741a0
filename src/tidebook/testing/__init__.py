"""Test support for users and Tidebook: scenarios, conformance suites, faults, clocks, histories, real servers."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidebook.domain.scenario import Scenario, scenario
    from tidebook.testing.clock import ManualClock

__all__ = ["ManualClock", "Scenario", "scenario"]

if not TYPE_CHECKING:  # a type checker that saw `__getattr__` would accept any name

    def __getattr__(name: str) -> Any:
        """Import a name at its first use, because pytest loads this package in every project, so it must load fast."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from tidebook.domain import scenario
        from tidebook.testing.clock import ManualClock

        found = ManualClock if name == "ManualClock" else getattr(scenario, name)
        globals()[name] = found
        return found
