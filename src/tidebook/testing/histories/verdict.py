"""The checker's verdict on each rule, and the violations that it found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

#: The number of violations that are kept per rule: the first ones show the cause, and there may be very many.
VIOLATIONS_MAX = 100


class Violation(msgspec.Struct, frozen=True):
    """One way in which a history breaks a rule."""

    #: The journal, tag, topic, entry or table that broke the rule.
    subject: str
    message: str
    #: Whether the checker gave up before it could decide whether this is a violation.
    undecided: bool = False


class RuleVerdict(msgspec.Struct, frozen=True):
    """The result of checking one rule."""

    rule: str
    #: The number of facts that were checked; a verdict without any proves nothing.
    checked: int
    violations: tuple[Violation, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the history keeps the rule."""
        return not self.violations


class RuleRun:
    """Counts the checked facts of a rule, and collects its violations."""

    def __init__(self, rule: str) -> None:
        self._rule = rule
        self._checked = 0
        self._violations: list[Violation] = []

    def count(self, checked: int = 1) -> None:
        """Count checked facts, violated or not."""
        self._checked += checked

    def violated(self, subject: str, message: str, *, undecided: bool = False) -> None:
        """Add a violation."""
        if len(self._violations) < VIOLATIONS_MAX:
            self._violations.append(Violation(subject, message, undecided))

    def verdict(self) -> RuleVerdict:
        """Return the verdict."""
        return RuleVerdict(self._rule, self._checked, tuple(self._violations))


def first_few(values: Iterable[object], most: int = 5) -> str:
    """Return the first values as text, and the number of the others."""
    listed = list(values)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(map(str, listed[:most])) + more


def repeated(values: Iterable[str]) -> Iterator[str]:
    """Yield every value that occurred earlier in the sequence."""
    seen: set[str] = set()
    for value in values:
        if value in seen:
            yield value
        seen.add(value)
