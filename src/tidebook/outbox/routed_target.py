"""Two targets behind one: topics of journals go to journals, all others to the log."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tidebook.log.relay_port import Channel, Found, RelayTarget, Scan, TargetTopic
from tidebook.outbox.journal_message import PREFIX


class RoutedTarget:
    """Opens each target when a topic first needs it."""

    def __init__(self, log: Callable[[], RelayTarget], journals: Callable[[], RelayTarget]) -> None:
        self._make = {False: log, True: journals}
        self._made: dict[bool, RelayTarget] = {}
        self._making = threading.Lock()

    def _of(self, topic: str) -> RelayTarget:
        which = topic.startswith(PREFIX)
        with self._making:
            if which not in self._made:
                self._made[which] = self._make[which]()
            return self._made[which]

    def topic(self, topic: str, *, fresh: bool = False) -> TargetTopic:
        """The topic where it belongs."""
        return self._of(topic).topic(topic, fresh=fresh)

    def ends(self, topic: TargetTopic, *, fresh: bool = False) -> dict[int, int]:
        """As its target says."""
        return self._of(topic.topic).ends(topic, fresh=fresh)

    def channel(self, topic: TargetTopic, *, fresh: bool, singly: bool = False) -> Channel:
        """As its target makes it."""
        return self._of(topic.topic).channel(topic, fresh=fresh, singly=singly)

    def release(self, topic: str) -> None:
        """Where it was taken, if it was."""
        if topic.startswith(PREFIX) in self._made:
            self._of(topic).release(topic)

    def tend(self) -> None:
        """All that were opened."""
        for target in list(self._made.values()):
            target.tend()

    def scan(self, topic: TargetTopic, scan: Scan, on_step: Callable[[], None]) -> Found:
        """As its target looks."""
        return self._of(topic.topic).scan(topic, scan, on_step)

    def close(self) -> None:
        """All that were opened."""
        for target in self._made.values():
            target.close()
