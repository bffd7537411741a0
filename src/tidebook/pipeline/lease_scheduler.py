"""Keep the partitions of a run leased: one lane of successive Spark jobs for each share of the partitions."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from pyspark import InheritableThread, SparkContext

from tidebook.core.errors import TidebookError
from tidebook.core.topic_config import TopicConfig
from tidebook.pipeline.errors import failure_of
from tidebook.pipeline.lease import Lease, LeaseTask
from tidebook.pipeline.session import ignore_spark_exit
from tidebook.pipeline.task_result import TaskResult
from tidebook.replication.partition import Partition
from tidebook.runtime.backoff import Backoff

#: The next lease of a lane is submitted this long before the end of the current one.
OVERLAP_S = 1.0
#: How long a tail continues after its task, because its successor may start late on busy cores. It is no longer than a
#: lease: after that, the successor's tail would mistake it for another replicator.
HANDOVER_S = 5.0
#: A lease is abandoned this long after it should have ended: its task is killed and its partitions are leased again.
OVERDUE_S = 5.0
#: Each abandoned lease doubles that time for its lane, up to this limit, until a lease ends in time. A lease includes
#: the start of its worker, which on busy cores may take longer than the lease. Otherwise every worker would be killed
#: before it has replicated anything.
OVERDUE_S_MAX = 80.0
#: The duration of a lease with stop offsets, which ends when it has reached them.
ENDLESS_S = 1e9

Share = tuple[Partition, ...]


def share_partitions(before: Sequence[Share], partitions: Sequence[Partition], lanes: int) -> list[Share]:
    """Divide partitions among lanes as evenly as possible; partitions stay in their lane if the number of lanes does.

    >>> share_partitions([], [("a", 0), ("a", 1), ("a", 2)], 2)
    [(('a', 0), ('a', 2)), (('a', 1),)]
    """
    shares: list[list[Partition]] = [[] for _ in range(max(1, min(lanes, len(partitions))))]
    remaining = dict.fromkeys(partitions)
    if len(before) == len(shares):
        for share, old in zip(shares, before, strict=True):
            share += [partition for partition in old if partition in remaining]
            for partition in share:
                del remaining[partition]
    for partition in remaining:
        min(shares, key=len).append(partition)
    return [tuple(share) for share in shares]


@dataclass(eq=False)
class _LeaseJob:
    """A lease and its submitted Spark job."""

    lane: int
    lease: Lease
    group: str
    began_s: float


@dataclass
class _LeaseEnd:
    running: _LeaseJob
    results: Sequence[TaskResult] = ()
    error: TidebookError | None = None


@dataclass
class _Lane:
    share: Share
    #: The oldest first; at most the current lease and its successor.
    running: list[_LeaseJob] = field(default_factory=list)
    overdue: Backoff = field(default_factory=lambda: Backoff(first_s=OVERDUE_S, max_s=OVERDUE_S_MAX))
    overdue_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.overdue_s = self.overdue.next_s()


class LeaseScheduler:
    """Submits the leases of one run as Spark jobs and collects their results. It belongs to one thread.

    `new_task` creates the task of an encoded lease; `on_end` receives the results of each lease that ended; `revoke` is
    called with the new generation when all leases of earlier generations must end.
    """

    def __init__(
        self,
        context: SparkContext,
        *,
        run: str,
        lease_s: float,
        new_task: Callable[[bytes], LeaseTask],
        on_end: Callable[[Sequence[TaskResult]], None],
        revoke: Callable[[int], None],
    ) -> None:
        self._context = context
        self._run = run
        self._lease_s = lease_s
        self._new_task = new_task
        self._on_end = on_end
        self._revoke = revoke
        self._configs: dict[str, TopicConfig] = {}
        self._stops: Mapping[Partition, int] | None = None
        self._slots = 0
        self._generation = 0
        self._number = 0
        self._lanes: list[_Lane] = []
        #: Abandoned leases, and leases of removed lanes, whose jobs have not ended.
        self._retired: set[_LeaseJob] = set()
        self._ended: queue.SimpleQueue[_LeaseEnd] = queue.SimpleQueue()

    def assign(self, configs: Mapping[str, TopicConfig], stops: Mapping[Partition, int] | None = None) -> None:
        """Lease the partitions of these topics; if they have changed, new leases replace all current ones."""
        partitions = [(topic, number) for topic, each in configs.items() for number in range(each.partitions)]
        if stops is not None:
            partitions = [partition for partition in partitions if stops.get(partition, 0) > 0]
        slots = self._free_slots()
        before = [lane.share for lane in self._lanes]
        shares = share_partitions(before, partitions, slots)
        if shares == before and dict(configs) == self._configs:
            return
        self._configs, self._stops, self._slots = dict(configs), stops, slots
        self._generation += 1
        if self._lanes:
            self._retired.update(each for lane in self._lanes for each in lane.running)
            self._revoke(self._generation)
        self._lanes = [_Lane(share) for share in shares if share]
        for number in range(len(self._lanes)):
            self._submit(number)

    def step(self, within_s: float) -> None:
        """Handle the leases that ended, and submit those that are due; raise the error of a lease that failed."""
        try:
            ended = self._ended.get(timeout=within_s)
            while True:
                self._handle(ended)
                ended = self._ended.get_nowait()
        except queue.Empty:
            pass
        now_s = time.monotonic()
        for number, lane in enumerate(self._lanes):
            if self._stops is None and (not lane.running or self._is_due(lane, now_s)):
                self._submit(number)
            for each in list(lane.running):
                if now_s > each.began_s + each.lease.seconds + OVERLAP_S + lane.overdue_s:
                    self._abandon(lane, each)

    @property
    def done(self) -> bool:
        """Return whether no lease is running; leases with stop offsets all end, others are replaced."""
        return not any(lane.running for lane in self._lanes)

    def close(self, within_s: float) -> None:
        """Revoke all leases, wait for them, and kill the tasks that do not end within `within_s`."""
        deadline_s = time.monotonic() + within_s
        running = {each for lane in self._lanes for each in lane.running} | self._retired
        if running and not self.done:
            self._generation += 1
            self._revoke(self._generation)
        while running and (left_s := deadline_s - time.monotonic()) > 0:
            try:
                ended = self._ended.get(timeout=left_s)
            except queue.Empty:
                break
            running.discard(ended.running)
            self._on_end(ended.results)
        for each in running:
            self._cancel(each)
        self._lanes = []

    def _is_due(self, lane: _Lane, now_s: float) -> bool:
        return len(lane.running) == 1 and now_s >= lane.running[0].began_s + self._lease_s - OVERLAP_S

    def _submit(self, number: int) -> None:
        lane = self._lanes[number]
        self._number += 1
        stops = None if self._stops is None else tuple(self._stops[partition] for partition in lane.share)
        seconds = self._lease_s if stops is None else ENDLESS_S
        topics = {topic for topic, _ in lane.share}
        configs = {topic: self._configs[topic] for topic in topics}
        handover_s = min(HANDOVER_S, self._lease_s)
        lease = Lease(self._run, self._generation, lane.share, configs, seconds, handover_s, stops)
        running = _LeaseJob(number, lease, f"tidebook-{self._run}-{self._number}", time.monotonic())
        lane.running.append(running)
        InheritableThread(target=self._run_job, args=(running, self._number), daemon=True).start()

    def _run_job(self, running: _LeaseJob, number: int) -> None:
        """Run a lease as a Spark job and wait for it; called in a separate thread."""
        context, lease = self._context, running.lease
        try:
            partitions = ", ".join(f"{topic}/{partition}" for topic, partition in lease.partitions[:8])
            more = f" and {len(lease.partitions) - 8} more" if len(lease.partitions) > 8 else ""
            context.setJobGroup(running.group, f"replicate {partitions}{more}, lease {number}", interruptOnCancel=True)
            task: Callable[[Iterable[int]], Iterable[bytes]] = self._new_task(msgspec.json.encode(lease))
            rows = context.parallelize([0], 1).mapPartitions(task).collect()
            self._ended.put(_LeaseEnd(running, [msgspec.json.decode(row, type=TaskResult) for row in rows]))
        except Exception as error:
            self._ended.put(_LeaseEnd(running, error=failure_of(error)))

    def _handle(self, ended: _LeaseEnd) -> None:
        running = ended.running
        if running in self._retired:
            self._retired.discard(running)
            self._on_end(ended.results)
            return  # an error is ignored: the lease that replaced it encounters it too
        lane = self._lanes[running.lane]
        self._remove(lane, running)
        if ended.error is not None:
            raise ended.error
        lane.overdue.reset()
        lane.overdue_s = lane.overdue.next_s()
        self._on_end(ended.results)

    def _abandon(self, lane: _Lane, running: _LeaseJob) -> None:
        """Kill a task that does not end; its successor is already running or is submitted next."""
        self._remove(lane, running)
        lane.overdue_s = lane.overdue.next_s()
        self._retired.add(running)
        self._cancel(running)

    def _remove(self, lane: _Lane, running: _LeaseJob) -> None:
        lane.running.remove(running)
        if lane.running and len(self._lanes) >= self._slots:
            lane.running[0].began_s = time.monotonic()  # it had to wait for the slot of the lease that ended

    def _cancel(self, running: _LeaseJob) -> None:
        with ignore_spark_exit():
            self._context.cancelJobGroup(running.group)

    def _free_slots(self) -> int:
        """Return how many tasks can run concurrently now; executors that were lost do not count."""
        context = self._context._jsc.sc()
        return max(1, int(context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile())))
