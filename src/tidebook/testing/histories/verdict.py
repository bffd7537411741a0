"""Verdicts: what the checker found about each rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

#: How many violations of a rule are kept; the first ones tell the cause, and a broken rule may break everywhere.
VIOLATIONS_MAX = 100


class Violation(msgspec.Struct, frozen=True):
    """One way in which a history breaks a rule."""

    #: The journal, tag, topic, entry or table that it is about.
    subject: str
    message: str
    #: Whether the search was given up before it could decide.
    undecided: bool = False


class RuleVerdict(msgspec.Struct, frozen=True):
    """The result of checking one rule."""

    rule: str
    #: How many facts the rule was checked against; a rule that nothing was checked against proves nothing.
    checked: int
    violations: tuple[Violation, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the history keeps the rule."""
        return not self.violations


class RuleRun:
    """Counts what a rule is checked against, and collects its violations."""

    def __init__(self, rule: str) -> None:
        self._rule = rule
        self._checked = 0
        self._violations: list[Violation] = []

    def check(self, count: int = 1) -> None:
        """Count facts that are checked."""
        self._checked += count

    def violated(self, subject: str, message: str, *, undecided: bool = False) -> None:
        """Add a violation."""
        if len(self._violations) < VIOLATIONS_MAX:
            self._violations.append(Violation(subject, message, undecided))

    def verdict(self) -> RuleVerdict:
        """Return what was found."""
        return RuleVerdict(self._rule, self._checked, tuple(self._violations))


def first_few(values: Iterable[object], most: int = 5) -> str:
    """Return the first values as text, and how many follow."""
    listed = list(values)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(map(str, listed[:most])) + more


def repeated(values: Iterable[str]) -> Iterator[str]:
    """Yield every value that has occurred before."""
    seen: set[str] = set()
    for value in values:
        if value in seen:
            yield value
        seen.add(value)
