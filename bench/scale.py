"""A model of the pipeline's size: how many cores, nodes and partitions a load needs; and this machine, simulated.

`python -m bench.scale` prints what the model says of this machine beside what was measured on it, and the sizes for a
million events per second. Costs are processor time per event and per slice, measured with `./dev bench pipeline`; see
`docs/explanation/scale.md`.
"""

from __future__ import annotations

import heapq
import json
import random
from dataclasses import dataclass, replace
from math import ceil

from bench.timing import percentile

US = 1e-6
MS = 1e-3


@dataclass(frozen=True)
class Costs:
    """Processor time of one core, in seconds."""

    #: The store's node: for an event row and its head, and for each request of a slice.
    node_event_s: float
    node_request_s: float
    #: The Python worker: decode, fold and send an event; plan a slice and await its requests.
    worker_event_s: float
    worker_slice_s: float
    #: Spark's JVM for a record of a micro-batch; a lease does not pass records through it.
    jvm_event_s: float
    #: The broker: for a record that is appended and read once, and for each fetch.
    broker_event_s: float
    #: What else runs on this machine during a measurement with appends: the appender and the measuring reads.
    appender_event_s: float

    def catch_up_s(self) -> float:
        """Of an event in a micro-batch: slices are large, so that only events count."""
        return self.node_event_s + self.worker_event_s + self.jvm_event_s

    def tail_event_s(self) -> float:
        """Of an event in a lease, without the slice's own cost."""
        return self.node_event_s + self.worker_event_s + self.broker_event_s + self.appender_event_s


#: Requests of a small slice: pointer, heads, event rows, heads, pointer; a tag row now and then is not counted.
REQUESTS = 5
#: Measured on this machine by `./dev bench pipeline --only replicate,steady`: see docs/explanation/scale.md.
MEASURED = Costs(
    node_event_s=24 * US,
    node_request_s=0.25 * MS,
    worker_event_s=16 * US,
    worker_slice_s=0.8 * MS,
    jvm_event_s=9 * US,
    broker_event_s=60 * US,
    appender_event_s=150 * US,
)


@dataclass(frozen=True)
class Machine:
    """What a simulated machine has and does."""

    cores: int = 2
    partitions: int = 8
    appends_per_s: float = 1000.0
    #: Appends come in groups, as a busy application's do.
    append_every_s: float = 0.05
    slice_every_s: float = 0.05
    #: What a request waits for besides processors: the network, the commit log's sync, a wake-up.
    request_wait_s: float = 2 * MS


def catch_up_per_s(costs: Costs, machine: Machine) -> float:
    """Events per second of a catch-up, in which all parties share the cores."""
    return machine.cores / costs.catch_up_s()


@dataclass(frozen=True)
class Tail:
    """What a simulated tail comes to."""

    p50_s: float
    p99_s: float
    cores: float


def simulate_tail(costs: Costs, machine: Machine, *, seconds: float = 20.0, seed: int = 1) -> Tail:
    """Simulate leases under a steady load: groups of appends, slices of partitions, and cores that serve in turn.

    Every step of a slice takes a core for its processor time, first come first served, and then waits for what is not
    processor time. The appender and the broker take cores in the same way.
    """
    draw = random.Random(seed)
    cores = [0.0] * machine.cores  # when each is free
    heapq.heapify(cores)
    busy = 0.0

    def run(at: float, work_s: float) -> float:
        nonlocal busy
        began = max(at, heapq.heappop(cores))
        heapq.heappush(cores, began + work_s)
        busy += work_s
        return began + work_s

    waiting: list[list[float]] = [[] for _ in range(machine.partitions)]
    free_at = [0.0] * machine.partitions
    delays: list[float] = []
    group = machine.appends_per_s * machine.append_every_s
    #: What happens next: appends (-1), or a slice of a partition.
    agenda: list[tuple[float, int]] = [(0.0, -1)]
    scheduled = [False] * machine.partitions
    while agenda:
        at, partition = heapq.heappop(agenda)
        if partition == -1:
            if at > seconds:
                continue
            sent = run(at, group * (costs.appender_event_s + costs.broker_event_s))
            for _ in range(round(group)):
                chosen = draw.randrange(machine.partitions)
                waiting[chosen].append(at)
                if not scheduled[chosen]:
                    scheduled[chosen] = True
                    heapq.heappush(agenda, (max(sent, free_at[chosen]), chosen))
            heapq.heappush(agenda, (max(sent, at + machine.append_every_s), -1))
            continue
        records, waiting[partition] = waiting[partition], []
        now = run(at, costs.worker_slice_s + len(records) * costs.worker_event_s)
        for request in range(REQUESTS):
            rows_s = len(records) * costs.node_event_s / 2 if request in (2, 3) else 0.0
            now = run(now, costs.node_request_s + rows_s) + machine.request_wait_s * draw.expovariate(1.0)
        delays += [now - each for each in records]
        free_at[partition] = max(now, at + machine.slice_every_s)
        scheduled[partition] = bool(waiting[partition])
        if scheduled[partition]:
            heapq.heappush(agenda, (free_at[partition], partition))
    return Tail(percentile(delays, 0.5), percentile(delays, 0.99), busy / seconds)


@dataclass(frozen=True)
class Size:
    """What a load needs."""

    log_partitions: int
    brokers: int
    store_nodes: int
    executor_cores: int


#: A core that is busier than this answers late.
UTILIZATION_MAX = 0.6
#: One log partition is replicated by one worker, one slice after another.
PARTITION_UTILIZATION_MAX = 0.5


def size_for(
    costs: Costs, events_per_s: float, *, replicas: int = 3, node_cores: int = 16, broker_cores: int = 16
) -> Size:
    """Return the size for a load of single-event appends that is replicated as it comes.

    A slice costs its requests once for all its events; at twenty slices a second and partition they are few beside the
    events, as soon as a partition has a thousand events per second.
    """
    per_partition = PARTITION_UTILIZATION_MAX / (costs.worker_event_s * 2)  # its worker also waits for the store
    partitions = ceil(events_per_s / per_partition)
    slices_per_s = partitions / 0.05
    worker_cores = events_per_s * costs.worker_event_s + slices_per_s * costs.worker_slice_s
    node_cores_s = events_per_s * costs.node_event_s + slices_per_s * REQUESTS * costs.node_request_s
    broker_cores_s = events_per_s * costs.broker_event_s
    return Size(
        log_partitions=partitions,
        brokers=max(3, ceil(broker_cores_s * replicas / 2 / broker_cores / UTILIZATION_MAX)),
        store_nodes=max(3, ceil(node_cores_s * replicas / node_cores / UTILIZATION_MAX)),
        executor_cores=ceil(worker_cores / UTILIZATION_MAX),
    )


def main() -> None:
    """Print the model's figures as one JSON object."""
    machine = Machine()
    tail = simulate_tail(MEASURED, machine)
    print(
        json.dumps(
            {
                "catch_up_events_per_s": round(catch_up_per_s(MEASURED, machine)),
                "tail_p50_s": round(tail.p50_s, 3),
                "tail_p99_s": round(tail.p99_s, 3),
                "tail_cores": round(tail.cores, 2),
                "tail_four_cores_p50_s": round(simulate_tail(MEASURED, replace(machine, cores=4)).p50_s, 3),
                "million_events_per_s": size_for(MEASURED, 1e6).__dict__,
            }
        )
    )


if __name__ == "__main__":
    main()
