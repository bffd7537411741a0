"""Scenarios test a decider without a book: given events, a command, and the events that must follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidebook.core.event import Event, decode_event, encode_event
from tidebook.domain.decider import Rules


def scenario(decider: Any, *, events: Sequence[type[Any]] | None = None) -> Scenario:
    """Return a scenario of a decider.

    >>> def test_withdraw(Account, Opened, Withdraw, Withdrawn):
    ...     scenario(Account).given([Opened(50)]).when(Withdraw(30)).then([Withdrawn(30)])
    """
    return Scenario(Rules(decider, events))


class Scenario:
    """The state of an entity after given events, and the result of a command on it."""

    def __init__(self, rules: Rules[Any]) -> None:
        self._rules = rules
        self.state: Any = rules.initial()
        self._decided: list[Any] | None = None
        self._refusal: Exception | None = None

    def given(self, events: Sequence[Any]) -> Scenario:
        """Apply events that happened before; each is encoded and decoded, as a journal would."""
        self.state = self._rules.evolve_all(self.state, self._stored(events))
        return self

    def when(self, command: Any, *arguments: Any) -> Scenario:
        """Run a command on the state; a refusal is kept for `refused`."""
        self._decided = self._refusal = None
        try:
            self._decided = self._rules.decide(self.state, command, arguments)
        except Exception as error:
            self._refusal = error
            return self
        self.state = self._rules.evolve_all(self.state, self._stored(self._decided))
        return self

    def then(self, events: Sequence[Any]) -> Scenario:
        """Check that the command produced exactly these events."""
        if self._refusal is not None:
            raise AssertionError(f"the command was refused: {self._refusal!r}") from self._refusal
        found = [_unwrapped(each) for each in self._found()]
        expected = [_unwrapped(each) for each in events]
        assert found == expected, f"the command produced {found}, not {expected}"
        return self

    def then_state(self, state: Any) -> Scenario:
        """Check the state after the command."""
        self._found()
        assert self.state == state, f"the state is {self.state!r}, not {state!r}"
        return self

    def refused(self, error: type[Exception] = Exception, match: str = "") -> Scenario:
        """Check that the command was refused with this error, whose text contains `match`."""
        if self._refusal is None:
            raise AssertionError(f"the command was accepted: {self._found()}")
        assert isinstance(self._refusal, error), f"the command was refused with {self._refusal!r}, not {error.__name__}"
        assert match in str(self._refusal), f"{match!r} is not in {str(self._refusal)!r}"
        return self

    def _found(self) -> list[Any]:
        if self._decided is None:
            raise AssertionError("call when(command) first")
        return self._decided

    def _stored(self, events: Sequence[Any]) -> list[Any]:
        """Return the events as a journal would return them."""
        types = self._rules.types
        encoded = [decode_event(encode_event(each)) for each in types.encode_all(list(events))]
        return [types.decode(each, "scenario", "entity", number) for number, each in enumerate(encoded, 1)]


def _unwrapped(event: Any) -> Any:
    return event.payload if isinstance(event, Event) else event
