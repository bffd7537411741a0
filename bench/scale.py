"""A capacity model of the pipeline: the cores, nodes and partitions that a load needs, and a simulated machine.

`python -m bench.scale` prints the figures of the model for this machine, and the sizes for a million events per
second; with `--events-per-s`, only the sizes for that load. Costs are processor time per event and per slice, measured
with `./dev bench pipeline`; see `docs/explanation/scale.md`.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from bench.timing import percentile

US = 1e-6
MS = 1e-3


@dataclass(frozen=True)
class Costs:
    """Processor time of one core, in seconds."""

    #: The store's node: the cost of an event row with its head, and of each request of a slice.
    node_event_s: float
    node_request_s: float
    #: The Python worker: the cost of decoding, folding and sending an event, and of a slice's plan and requests.
    worker_event_s: float
    worker_slice_s: float
    #: Spark's JVM: the cost of a record of a micro-batch; records of a lease do not pass through it.
    jvm_event_s: float
    #: The broker: the cost of a record that is appended and read once, and of each fetch.
    broker_event_s: float
    #: The appender and the measuring reads, which run on this machine during a measurement with appends.
    appender_event_s: float

    def catch_up_s(self) -> float:
        """Return the cost of an event in a micro-batch, whose slices are so large that only events matter."""
        return self.node_event_s + self.worker_event_s + self.jvm_event_s

    def tail_event_s(self) -> float:
        """Return the cost of an event in a lease, without the cost of its slice."""
        return self.node_event_s + self.worker_event_s + self.broker_event_s + self.appender_event_s


#: Requests of a small slice: pointer, heads, event rows, heads, pointer; an occasional tag row is not counted.
REQUESTS = 5
#: Measured on this machine by `./dev bench pipeline --only replicate,steady`: see docs/explanation/scale.md.
MEASURED = Costs(
    node_event_s=24 * US,
    node_request_s=1.04 * MS,
    worker_event_s=16 * US,
    worker_slice_s=2.9 * MS,
    jvm_event_s=9 * US,
    broker_event_s=110 * US,
    appender_event_s=240 * US,
)


#: The spread of a request's waiting time, as the standard deviation of its logarithm: some wait much longer than most.
SPREAD = 1.2


@dataclass(frozen=True)
class Machine:
    """A simulated machine and its load."""

    cores: int = 2
    partitions: int = 8
    appends_per_s: float = 1000.0
    #: Appends arrive in groups, as from a busy application.
    append_every_s: float = 0.05
    slice_every_s: float = 0.03
    #: The average time that a request waits for anything other than processors: the commit log's sync, wake-ups, other
    #: processes.
    request_wait_s: float = 9 * MS


def catch_up_per_s(costs: Costs, machine: Machine) -> float:
    """Return the events per second of a catch-up, in which all processes share the cores."""
    return machine.cores / costs.catch_up_s()


@dataclass(frozen=True)
class Tail:
    """The delays of a simulated tail, and the cores that it uses."""

    p50_s: float
    p99_s: float
    cores: float


def simulate_tail(costs: Costs, machine: Machine, *, seconds: float = 200.0, seed: int = 1) -> Tail:
    """Simulate leases under a steady load of groups of appends, which become slices of partitions.

    Every step of a slice takes a core for its processor time, first come first served, and then waits for the rest of
    its duration. The appender and the broker take cores in the same way. Over 200 s, the p99 of six seeds differ by at
    most a seventh; over 20 s, those of twenty seeds differ by up to a factor of two.
    """
    draw = random.Random(seed)
    free_at = [0.0] * machine.cores
    busy_s = 0.0

    def run(at: float, work_s: float) -> float:
        """Take the core that is free first; return the end of the work. Calls must be in the order of their times."""
        nonlocal busy_s
        done = max(at, heapq.heappop(free_at)) + work_s
        heapq.heappush(free_at, done)
        busy_s += work_s
        return done

    waiting: list[list[float]] = [[] for _ in range(machine.partitions)]
    idle = [True] * machine.partitions
    delays: list[float] = []
    group = round(machine.appends_per_s * machine.append_every_s)
    #: The next events by time: a group of appends (without a slice), or a step of a slice.
    agenda: list[tuple[float, int, _Slice | None]] = [(0.0, 0, None)]
    count = 0

    def plan(at: float, each: _Slice | None) -> None:
        nonlocal count
        count += 1
        heapq.heappush(agenda, (at, count, each))

    while agenda:
        at, _, each = heapq.heappop(agenda)
        if each is None:
            if at > seconds:
                continue
            sent = run(at, group * (costs.appender_event_s + costs.broker_event_s))
            for _ in range(group):
                chosen = draw.randrange(machine.partitions)
                waiting[chosen].append(at)
                if idle[chosen]:
                    idle[chosen] = False
                    plan(sent, _Slice(chosen))
            plan(at + machine.append_every_s, None)
        elif each.step == 0:
            each.began_s = at
            each.records, waiting[each.partition] = waiting[each.partition], []
            each.step = 1
            plan(run(at, costs.worker_slice_s + len(each.records) * costs.worker_event_s), each)
        elif each.step <= REQUESTS:
            rows_s = len(each.records) * costs.node_event_s / 2 if each.step in (3, 4) else 0.0
            each.step += 1
            done = run(at, costs.node_request_s + rows_s)
            plan(done + machine.request_wait_s * draw.lognormvariate(-(SPREAD**2) / 2, SPREAD), each)
        else:
            delays += [at - appended for appended in each.records]
            if waiting[each.partition]:
                plan(max(at, each.began_s + machine.slice_every_s), _Slice(each.partition))
            else:
                idle[each.partition] = True
    return Tail(percentile(delays, 0.5), percentile(delays, 0.99), busy_s / seconds)


@dataclass
class _Slice:
    """A slice of a partition, and its current step."""

    partition: int
    step: int = 0
    began_s: float = 0.0
    records: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Size:
    """The resources that a load needs."""

    log_partitions: int
    brokers: int
    store_nodes: int
    executor_cores: int


#: Above this utilization, requests wait too long for a core.
UTILIZATION_MAX = 0.6
#: One log partition is replicated by one worker, one slice after another.
PARTITION_UTILIZATION_MAX = 0.5


def size_for(
    costs: Costs, events_per_s: float, *, replicas: int = 3, node_cores: int = 16, broker_cores: int = 16
) -> Size:
    """Return the size for a load of single-event appends that are replicated as they arrive.

    The requests of a slice cost the same for any number of events; at thirty slices per second and partition, they cost
    little compared with the events once a partition has a thousand events per second.
    """
    per_partition = PARTITION_UTILIZATION_MAX / (costs.worker_event_s * 2)  # its worker waits for the store too
    partitions = ceil(events_per_s / per_partition)
    slices_per_s = partitions / Machine.slice_every_s
    worker_cores = events_per_s * costs.worker_event_s + slices_per_s * costs.worker_slice_s
    node_cores_s = events_per_s * costs.node_event_s + slices_per_s * REQUESTS * costs.node_request_s
    broker_cores_s = events_per_s * costs.broker_event_s
    return Size(
        log_partitions=partitions,
        brokers=max(3, ceil(broker_cores_s * replicas / 2 / broker_cores / UTILIZATION_MAX)),
        store_nodes=max(3, ceil(node_cores_s * replicas / node_cores / UTILIZATION_MAX)),
        executor_cores=ceil(worker_cores / UTILIZATION_MAX),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the model's figures as one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description="Compute the size of a deployment.")
    parser.add_argument("--events-per-s", type=float, help="print only the sizes for this rate of single-event appends")
    parser.add_argument("--replicas", type=int, default=3, help="of the log and of the store (default: %(default)s)")
    parser.add_argument("--cores", type=int, default=16, help="of a broker and of a store node (default: %(default)s)")
    given = parser.parse_args(arguments)
    if given.events_per_s is not None:
        cores = {"node_cores": given.cores, "broker_cores": given.cores}
        print(json.dumps(size_for(MEASURED, given.events_per_s, replicas=given.replicas, **cores).__dict__))
        return
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
