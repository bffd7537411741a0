"""The schedule of faults (kind, target, start and duration), which depends only on the seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import msgspec

from faults.plan import LEASE_S
from faults.proxy import MODES

#: When the first fault begins, after the start of the schedule.
FIRST_S = 3.0
GAP_S = (0.5, 2.5)
#: The probability that a fault begins together with the previous one.
TOGETHER = 0.25
RESTART_S = (0.0, 1.5)
NETWORK_S = (0.5, 2.5)
#: The duration of a pause, in leases of the workload.
PAUSE_LEASES = (1.5, 4.0)
#: The share of pauses that also outlast leases of fixed 10 s, such as a replicator's lock, and their duration.
LONG_PAUSE, LONG_PAUSE_S = 0.25, (11.0, 14.0)
CLOCK_S = (2.0, 6.0)
#: How long a server is down before it is started again, and about how long its start takes.
DOWN_S, START_S = (1.0, 6.0), 12.0
#: How long one broker and one node are down together, to measure which operations are available.
ONE_DOWN_S = (20.0, 25.0)
#: How long a node is cut off from the others of its cluster: longer than a broker's session and a node's timeouts.
PARTITION_S = (4.0, 15.0)
#: Kinds whose target is a kind of server, or the topics of the book, instead of one node.
ROLLING, ONE_DOWN, FOREIGN, MORE_PARTITIONS = "rolling", "one_down", "foreign", "more_partitions"
#: One node neither sends nor receives, only sends, or only receives; its clients still reach it.
PARTITION, DEAF, MUTE = "partition", "deaf", "mute"
PARTITIONS = (PARTITION, DEAF, MUTE)
#: The topics as a target.
TOPICS = "topics"
#: Writes and syncs of one process fail; the file system of all processes is full; the target of the latter.
DISK_ERROR, DISK_FULL, DISK = "disk_error", "disk_full", "disk"
DISK_S = (0.5, 3.0)
#: In a run that is long enough, every process is replaced once, after this share of it, by one of a later build.
UPGRADE, BUILD = "upgrade", "build"
UPGRADE_AT, UPGRADE_S_MIN = 0.6, 60.0


class PlannedFault(msgspec.Struct, frozen=True):
    """One fault: it begins `at_s` after the start of the schedule, and ends `duration_s` later."""

    at_s: float
    #: Either kill, pause, clock, a mode of the proxy, or a fault of servers.
    kind: str
    #: The process, server or proxy into which it is injected.
    target: str
    duration_s: float

    @property
    def is_network(self) -> bool:
        """Whether the target is a proxy."""
        return self.kind in MODES


class Targets(msgspec.Struct, frozen=True):
    """The possible targets of faults."""

    processes: Sequence[str]
    #: Proxies; the proxy of a server has the name of the server.
    proxies: Sequence[str]
    #: The names of servers by their kind.
    servers: Mapping[str, Sequence[str]] = {}
    lease_s: float = LEASE_S
    #: The processes whose clock cannot jump, because they are commands.
    clockless: Sequence[str] = ()
    #: The kinds of servers whose nodes can be cut off from each other.
    partitionable: Sequence[str] = ()
    #: Whether the files of an embedded book are on a file system that can be filled.
    fillable: bool = False

    def families(self) -> list[tuple[int, list[tuple[str, str]]]]:
        """Return the possible faults (kind, target) in families, each with its weight, by which it is chosen."""
        nodes = [name for names in self.servers.values() for name in names]
        found = [(4, [(kind, target) for target in self.processes]) for kind in ("kill", "pause")]
        found.append((2, [("clock", target) for target in self.processes if target not in self.clockless]))
        found += [(1, [(mode, target) for target in self.proxies]) for mode in MODES]
        if nodes:
            found += [(3, [(kind, target) for target in nodes]) for kind in ("kill", "pause")]
            found.append((1, [(ROLLING, kind) for kind in self.servers]))
            found += [(1, [(FOREIGN, TOPICS)]), (1, [(MORE_PARTITIONS, TOPICS)])]
        else:
            found.append((2, [(DISK_ERROR, target) for target in self.processes if target not in self.clockless]))
        if self.fillable:
            found.append((2, [(DISK_FULL, DISK)]))
        if self.partitionable:
            found.append((3, [(kind, target) for kind in PARTITIONS for target in self.partitionable]))
        if len(nodes) > len(self.servers):
            found.append((2, [(ONE_DOWN, "servers")]))
        return found


def make_schedule(seed: int, seconds: float, targets: Targets, *, only: str | None = None) -> list[PlannedFault]:
    """Return the faults of a run; `only` restricts them to one kind, or to one target or role."""
    chance = random.Random(seed)
    families = targets.families()
    if only is not None:
        families = [
            (weight, [each for each in family if only in (each[0], each[1], each[1].rsplit("-", 1)[0])])
            for weight, family in families
        ]
    families = [(weight, family) for weight, family in families if family]
    planned: list[PlannedFault] = []
    if only in (None, UPGRADE) and (seconds >= UPGRADE_S_MIN or only is not None):
        planned.append(PlannedFault(round(seconds * UPGRADE_AT, 2), UPGRADE, BUILD, 0.0))
        if only is not None:
            return planned
    if not families:
        raise ValueError(f"there is no fault or target {only!r}")
    at_s, busy_until = FIRST_S, dict[str, float]()
    while at_s < seconds:
        [(_, family)] = chance.choices(families, [weight for weight, _ in families])
        kind, target = chance.choice(family)
        bounds = _bounds(kind, target, targets)
        if kind == "pause" and target in targets.processes and chance.random() < LONG_PAUSE:
            bounds = LONG_PAUSE_S
        duration_s = round(chance.uniform(*bounds), 2)
        held, start_s = _held(kind, target, targets)
        if all(busy_until.get(each, 0.0) <= at_s for each in held):
            planned.append(PlannedFault(round(at_s, 2), kind, target, duration_s))
            busy_until |= dict.fromkeys(held, at_s + duration_s + start_s + 1.0)
        if chance.random() >= TOGETHER:
            at_s += chance.uniform(*GAP_S)
    return sorted(planned, key=lambda fault: fault.at_s)


def _kind_of_server(target: str, targets: Targets) -> str | None:
    return next((kind for kind, names in targets.servers.items() if target in names), None)


def _bounds(kind: str, target: str, targets: Targets) -> tuple[float, float]:
    least, most = PAUSE_LEASES
    pause = (least * targets.lease_s, most * targets.lease_s)
    if kind == "kill" and _kind_of_server(target, targets) is not None:
        return DOWN_S
    known = {"kill": RESTART_S, "pause": pause, "clock": CLOCK_S, ONE_DOWN: ONE_DOWN_S}
    known |= {DISK_ERROR: DISK_S, DISK_FULL: DISK_S}
    known |= dict.fromkeys(PARTITIONS, PARTITION_S)
    return known.get(kind, NETWORK_S)


def _held(kind: str, target: str, targets: Targets) -> tuple[list[str], float]:
    """Return the targets that no other fault may use at the same time, and how long the target takes to restart.

    Only one server of a kind is faulty at a time; more would be an outage, which no promise covers.
    """
    if kind == ONE_DOWN:
        return [*targets.servers], START_S
    if kind in PARTITIONS:
        return [target], 0.0
    if kind == ROLLING:
        return [target], START_S * len(targets.servers[target])
    server = _kind_of_server(target, targets)
    if server is not None:
        return [server], START_S if kind == "kill" else 0.0
    return [target], 0.0
