"""Route each topic to its target: journals' topics to journals, all others to the log."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tidebook.outbox.journal_message import PREFIX
from tidebook.outbox.target_port import Channel, FoundMessages, RelayTarget, Scan, TargetTopic


class RoutedTarget:
    """Opens each of the two targets when a topic first needs it."""

    def __init__(self, log: Callable[[], RelayTarget], journals: Callable[[], RelayTarget]) -> None:
        self._factories = {False: log, True: journals}
        self._targets: dict[bool, RelayTarget] = {}
        self._opening = threading.Lock()

    def _target_of(self, topic: str) -> RelayTarget:
        is_journal = topic.startswith(PREFIX)
        with self._opening:
            if is_journal not in self._targets:
                self._targets[is_journal] = self._factories[is_journal]()
            return self._targets[is_journal]

    def topic(self, topic: str, *, fresh: bool = False) -> TargetTopic:
        """Return the topic from its target."""
        return self._target_of(topic).topic(topic, fresh=fresh)

    def ends(self, topic: TargetTopic, *, fresh: bool = False) -> dict[int, int]:
        """Return the end offsets from the topic's target."""
        return self._target_of(topic.topic).ends(topic, fresh=fresh)

    def channel(self, topic: TargetTopic, *, fresh: bool, singly: bool = False) -> Channel:
        """Return a channel of the topic's target."""
        return self._target_of(topic.topic).channel(topic, fresh=fresh, singly=singly)

    def release(self, topic: str) -> None:
        """Release the topic in its target, if that was opened."""
        if topic.startswith(PREFIX) in self._targets:
            self._target_of(topic).release(topic)

    def maintain(self) -> None:
        """Serve the open targets."""
        for target in list(self._targets.values()):
            target.maintain()

    def scan(self, topic: TargetTopic, scan: Scan, on_step: Callable[[], None]) -> FoundMessages:
        """Scan with the topic's target."""
        return self._target_of(topic.topic).scan(topic, scan, on_step)

    def close(self) -> None:
        """Close the open targets."""
        for target in self._targets.values():
            target.close()
