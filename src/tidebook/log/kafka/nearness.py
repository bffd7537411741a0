"""Whether the broker is so near that looking for an acknowledgement beats being woken for it."""

from __future__ import annotations

from typing import Final

#: A record that is sent alone and acknowledged within this time, as a rule: two wake-ups would be a third of it.
NEAR_S: Final = 0.0006
#: How long one acknowledgement is looked for before it is waited for.
LOOK_S: Final = 0.001
#: How much the newest one tells.
_WEIGHT: Final = 0.25


class Nearness:
    """Learns how soon records that are sent alone are acknowledged. Times are the event loop's.

    >>> nearness = Nearness()
    >>> nearness.sent(1.0)
    >>> nearness.acknowledged(1.0003)
    >>> nearness.near, nearness.looks(1.0005), nearness.looks(1.002)
    (True, True, False)
    """

    __slots__ = ("_alone", "_usual_s", "near", "sent_at")

    def __init__(self) -> None:
        self.sent_at = 0.0
        self.near = False
        self._alone = False
        self._usual_s = -1.0

    def sent(self, now: float) -> None:
        """A record was sent, alone."""
        self.sent_at = now
        self._alone = True

    def joined(self) -> None:
        """Others were sent behind it: what comes back tells nothing."""
        self._alone = False

    def acknowledged(self, now: float) -> None:
        """Something was acknowledged: the one that was sent alone, if it still is."""
        if not self._alone:
            return
        self._alone = False
        took_s = now - self.sent_at
        self._usual_s = took_s if self._usual_s < 0 else self._usual_s + _WEIGHT * (took_s - self._usual_s)
        self.near = self._usual_s < NEAR_S

    def looks(self, now: float) -> bool:
        """Whether the one that was sent last is still looked for."""
        return self.near and now < self.sent_at + LOOK_S
