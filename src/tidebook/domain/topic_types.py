"""The event classes that the deciders and typed journals of a book have declared, by topic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a book without types does not load the codecs
    from tidebook.domain.event_type import EventTypes


class TopicTypes:
    """Collects declared classes; projections decode the events of a topic by them."""

    def __init__(self) -> None:
        self._classes: dict[str, dict[type, None]] = {}
        self._types: dict[str, EventTypes | None] = {}

    def add(self, topic: str, classes: Iterable[type]) -> None:
        """Add the classes of a topic's events; raise InvalidInput if two have the same event type."""
        from tidebook.domain.event_type import EventTypes

        together = self._classes.get(topic, {}) | dict.fromkeys(classes)
        if together:
            EventTypes(together)  # now, not at the first event
        self._classes[topic] = together
        self._types.clear()

    def of(self, topic: str) -> EventTypes | None:
        """Return the types of a topic; without any, all classes declared by `event_type`, or None."""
        from tidebook.domain.event_type import EventTypes, declared_types

        if topic not in self._types:
            classes = self._classes.get(topic)
            self._types[topic] = declared_types() if classes is None else EventTypes(classes)
        return self._types[topic]
