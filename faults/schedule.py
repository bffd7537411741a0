"""The schedule of faults: which, when, against what, for how long; a function of the seed alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from faults.plan import LEASE_S
from faults.proxy import MODES

#: The first fault waits until all processes have started.
FIRST_S = 3.0
GAP_S = (0.5, 2.5)
#: The chance that a fault begins together with the one before.
TOGETHER = 0.25
RESTART_S = (0.0, 1.5)
#: Past every lease.
PAUSE_S = (1.5 * LEASE_S, 4.0 * LEASE_S)
NETWORK_S = (0.5, 2.5)


class PlannedFault(msgspec.Struct, frozen=True):
    """One fault: it begins `at_s` after the workload, and ends `duration_s` later."""

    at_s: float
    #: kill, pause, or a mode of the proxy
    kind: str
    #: The process or the proxy that it is done to.
    target: str
    duration_s: float

    @property
    def is_network(self) -> bool:
        """Whether it is done to a proxy."""
        return self.kind in MODES


def make_schedule(
    seed: int, seconds: float, processes: Sequence[str], proxies: Sequence[str], *, only: str | None = None
) -> list[PlannedFault]:
    """Return the faults of a run; `only` restricts them to one kind, or to one target or role."""
    chance = random.Random(seed)
    choices = [(kind, target) for kind in ("kill", "pause") for target in processes]
    choices += [(mode, target) for mode in MODES for target in proxies]
    if only is not None:
        choices = [each for each in choices if only in (each[0], each[1], each[1].rsplit("-", 1)[0])]
        if not choices:
            raise ValueError(f"there is no fault or target {only!r}")
    # Each family of faults is equally likely, however many targets it has.
    families = [[each for each in choices if each[0] == kind] for kind in dict.fromkeys(kind for kind, _ in choices)]
    weights = [4 if family[0][0] in ("kill", "pause") else 1 for family in families]
    planned: list[PlannedFault] = []
    at_s, busy_until = FIRST_S, dict[str, float]()
    while at_s < seconds:
        [family] = chance.choices(families, weights)
        kind, target = chance.choice(family)
        bounds = {"kill": RESTART_S, "pause": PAUSE_S}.get(kind, NETWORK_S)
        duration_s = round(chance.uniform(*bounds), 2)
        if busy_until.get(target, 0.0) <= at_s:
            planned.append(PlannedFault(round(at_s, 2), kind, target, duration_s))
            busy_until[target] = at_s + duration_s + 1.0
        if chance.random() >= TOGETHER:
            at_s += chance.uniform(*GAP_S)
    return planned
