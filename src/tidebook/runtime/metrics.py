"""The metrics of a book, as prometheus-client objects; docs/reference/metrics.md lists the same names."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import prometheus_client.samples
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from tidebook.core.errors import InvalidInput, Unavailable

Labels = tuple[tuple[str, str], ...]
PORT_MAX = 65_535
#: The upper bounds of the buckets of a duration.
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

#: The description and the labels of each counter. They are exported as `tidebook_NAME_total`.
COUNTERS: dict[str, tuple[str, ...]] = {
    "cassandra_write_retries": ("Writes to Cassandra that were retried.", "reason"),
    "sqlite_commits": ("Commits of an embedded file.", "file"),
    "sqlite_operations": ("Write operations in those commits.", "file"),
    "head_cache_follow_failed": ("Attempts to follow a partition that failed, and were retried.",),
    "head_cache_reset": ("Head caches that were emptied because they were too far behind the log.",),
    "head_cache_resolved": ("Heads that were not cached, and were read from the store and the log.",),
    "kafka_callback_failed": ("Delivery callbacks that raised an error.",),
    "kafka_consumer_reassigned": ("Consumers that were assigned to their partition a second time.",),
    "kafka_consumer_closed": ("Kafka consumers closed.", "kind"),
    "kafka_consumer_opened": ("Kafka consumers opened.", "kind"),
    "kafka_producer_replaced": ("Kafka producers replaced after a fatal error.",),
    "kafka_send_failed": ("Records that were not acknowledged.", "error"),
    "kafka_sent": ("Records that Kafka acknowledged.",),
    "kafka_tail_read": ("Reads that were answered from a followed partition.",),
    "outbox_at_least_once": ("Times that exactly once could not be guaranteed.", "topic", "cause"),
    "outbox_batches": ("Batches that the target acknowledged.", "topic"),
    "outbox_database_failures": ("Connections to the database that were lost.",),
    "outbox_found": ("Messages of batches left open that were found in the log.", "topic"),
    "outbox_kafka_async_failures": ("Messages of backend kafka_async that were not acknowledged.", "topic"),
    "outbox_locks_lost": ("Locks that another relay took over.", "topic"),
    "outbox_rests": ("Errors after which sending to a topic paused.", "topic"),
    "outbox_sent": ("Messages that the target acknowledged.", "topic"),
    "outbox_sessions_open": ("Batches that were left open.", "topic"),
    "outbox_messages_parked": ("Messages parked, or held after a parked one.", "topic"),
    "pipeline_expired_purged": ("Expired journals that were purged.", "topic"),
    "pipeline_progress_failures": ("Failures to read the progress, which are retried.",),
    "pipeline_status_failures": ("Failures to write the status of the job, which are retried.",),
    "pipeline_parked": ("Records that were parked.", "topic"),
    "pipeline_purge_failures": ("Rounds of purging that failed, and were retried.",),
    "pipeline_queries_ended": ("Streaming queries that ended.", "failed"),
    "pipeline_queries_started": ("Streaming queries that were started.",),
    "pipeline_records": ("Records that were replicated.", "topic", "partition"),
    "queue_announce_failures": ("Failures to announce dead letters, which are retried.",),
    "queue_heartbeat_failures": ("Failures to renew a listener's registration, which are retried.",),
    "queue_claimed": ("Entries that were claimed.", "queue"),
    "queue_dead": ("Entries that became dead letters when their lease expired.", "queue"),
    "queue_done": ("Entries that were finished.", "queue"),
    "queue_expired": ("Waiting entries that expired.", "queue"),
    "queue_failed": ("Entries that were returned by `fail`.", "queue"),
    "queue_dead_letters_announced": ("Dead letters that were announced.", "queue"),
    "queue_hook_failures": ("Commands and webhooks of dead letters that failed.", "queue"),
    "queue_listen_failures": ("Failures to listen for wake-ups, which are retried.",),
    "queue_due_date_failures": ("Failures to read the next due date, which are retried.",),
    "queue_due_date_reads": ("Reads of the next due date of a queue.",),
    "queue_put": ("Entries that were put.", "queue"),
    "queue_leases_expired": ("Leases that expired.", "queue"),
    "queue_sweep_failures": ("Rounds of maintenance that failed, and were retried.",),
    "queue_wakeups": ("Times that listeners were woken.", "queue"),
    "read_head_cached": ("Reads whose head was in the head cache.",),
    "read_replanned": (
        "Reads that were planned again, because the journal changed or the log was truncated meanwhile.",
    ),
    "read_rows_discarded": ("Prefetched rows that had to be discarded.",),
    "read_store_only": ("Reads that needed only the store.",),
    "read_tail_retried": ("Reads that read the tail a second time.",),
    "read_without_store": ("Reads that were answered while the store was unavailable.",),
    "tag_pages": ("Pages of a tag view that were read from Cassandra.",),
    "running_failures": ("Failures of supervised parts.", "part"),
    "server_requests": ("Requests that the server answered.", "route", "status"),
    "tags_backtracks": ("Second reads of a recent time range by a delayed stream.", "tag"),
    "tags_delayed_found": ("Late events that a second read found.", "tag"),
    "tags_events_missing": ("Events that a delayed stream could not find.", "tag"),
    "tags_gaps_found": ("Gaps in the numbers of a tag.", "tag"),
    "tags_tick_failures": ("Rounds of ticks that failed, and were retried.",),
    "tail_read_from_log": ("Tails that were read from the log.",),
    "wal_claims": ("Claims of a region.", "namespace", "region"),
    "wal_cleaner_failures": ("Rounds of cleaning that failed, and were retried.", "namespace", "region"),
    "wal_fenced": ("Times that another writer claimed a region.", "namespace", "region"),
    "wal_forced_flushes": ("Calls of `on_pinned`.", "namespace", "region"),
    "wal_records": ("Records that were written to a region.", "namespace", "region"),
    "wal_snapshots": ("Snapshots that were written.", "namespace", "region"),
}
#: The description and the labels of each gauge, exported as `tidebook_NAME`.
GAUGES: dict[str, tuple[str, ...]] = {
    "kafka_brokers_down": ("1 while no broker is reachable.",),
    "outbox_exactly_once": ("1 while a fence is in force.", "topic"),
    "outbox_oldest_seconds": ("The age of the oldest waiting message at the last status.", "topic"),
    "outbox_parked": ("The parked messages at the last status.", "topic"),
    "outbox_waiting": ("The waiting messages at the last status; a relay with --metrics updates it.", "topic"),
    "pipeline_lag_records": ("The records that are not replicated yet.", "topic", "partition"),
    "pipeline_lag_seconds": ("The age of the oldest record that is not replicated yet.", "topic", "partition"),
    "pipeline_records_per_second": ("The records per second that were replicated lately.",),
    "pipeline_stopped_partitions": ("The partitions that replication does not advance.",),
    "server_open_streams": ("The streamed responses that are being sent.",),
    "tags_horizon_behind_seconds": ("How far the slowest partition is behind the most recent one.", "topics"),
    "tags_horizon_lag_seconds": ("The age of the horizon; it grows while nothing is appended.", "topics"),
    "wal_held_bytes": ("The bytes of a region that are not truncated, set by each cleaning.", "namespace", "region"),
    "wal_pinned_by_table": ("The table that keeps a region from being truncated, or -1.", "namespace", "region"),
    "wal_snapshot_age_seconds": ("The age of the latest snapshot.", "namespace", "region"),
    "wal_tables": ("The tables of a region.", "namespace", "region"),
}
#: The description and the labels of each duration, exported as the histogram `tidebook_NAME_seconds`.
DURATIONS: dict[str, tuple[str, ...]] = {
    "cassandra_read": ("Requests that read from Cassandra.",),
    "cassandra_slice": ("Slices that were applied to Cassandra.",),
    "kafka_consumer_init": ("Opening of a Kafka consumer.",),
    "kafka_consumer_poll": ("Waits of a Kafka consumer for records.",),
    "kafka_consumer_seek": ("Assignments of a Kafka consumer to another position.",),
    "outbox_send": ("Batches that were sent to the target.",),
    "pipeline_batch": ("Steps of Spark's micro-batches.", "step"),
    "pipeline_lease": ("Leases of log partitions.",),
    "pipeline_task": ("Work of a Spark task on its partition.",),
    "server_request": ("Requests until their response began, also if it is a stream.", "route"),
    "wal_recovery": ("Recoveries of a region.", "namespace", "region"),
}


class Sample(NamedTuple):
    """One value that is exported, named without the prefix `tidebook_`."""

    name: str
    labels: Labels
    value: float


class Timing(msgspec.Struct, frozen=True):
    """How often one operation was timed, and the sum of the durations."""

    count: int = 0
    total_s: float = 0.0


class Metrics:
    """The metrics of one book, in a separate registry. They are thread-safe."""

    def __init__(self) -> None:
        #: The registry to pass to `prometheus_client.start_http_server` and `generate_latest`.
        self.registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._metrics: dict[str, Any] = {}
        self._children: dict[tuple[object, ...], Any] = {}

    def count(self, name: str, n: float = 1, **labels: object) -> None:
        """Add to a counter."""
        self._child(COUNTERS, name, labels).inc(n)

    def gauge(self, name: str, value: float, **labels: object) -> None:
        """Set a gauge."""
        self._child(GAUGES, name, labels).set(value)

    def time(self, name: str, seconds: float, **labels: object) -> None:
        """Add a duration."""
        self._child(DURATIONS, name, labels).observe(seconds)

    def counter(self, name: str, **labels: object) -> Counter:
        """Return a counter with its labels; a caller that counts often keeps it, which saves the lookup."""
        found: Counter = self._child(COUNTERS, name, labels)
        return found

    def duration(self, name: str, **labels: object) -> Histogram:
        """Return a duration with its labels; a caller that times often keeps it, which saves the lookup."""
        found: Histogram = self._child(DURATIONS, name, labels)
        return found

    def counted(self, name: str, **labels: object) -> float:
        """Return the sum of a counter over all label sets that contain `labels`."""
        wanted = {label: str(value) for label, value in labels.items()}.items()
        found = [each for each in self._exported(name) if each.name.endswith("_total")]
        return sum(each.value for each in found if wanted <= each.labels.items())

    def timing(self, name: str, **labels: object) -> Timing:
        """Return the durations of an operation so far."""
        wanted = {label: str(value) for label, value in labels.items()}
        found = {each.name.rpartition("_")[2]: each.value for each in self._exported(name) if each.labels == wanted}
        return Timing(int(found.get("count", 0)), found.get("sum", 0.0))

    def samples(self) -> Iterator[Sample]:
        """Yield all values that are exported."""
        for metric in self.registry.collect():
            for sample in metric.samples:
                if not sample.name.endswith("_created"):
                    yield Sample(sample.name.removeprefix("tidebook_"), tuple(sample.labels.items()), sample.value)

    def _exported(self, name: str) -> list[prometheus_client.samples.Sample]:
        families = self._metrics[name].collect() if name in self._metrics else ()
        return [sample for family in families for sample in family.samples]

    def _child(self, kind: dict[str, tuple[str, ...]], name: str, labels: dict[str, object]) -> Any:
        key = (name, *labels.items())
        child = self._children.get(key)
        if child is None:
            with self._lock:
                if name not in self._metrics:
                    self._metrics[name] = self._create(kind, name)
            metric = self._metrics[name]
            child = self._children[key] = metric.labels(**labels) if labels else metric
        return child

    def _create(self, kind: dict[str, tuple[str, ...]], name: str) -> Counter | Gauge | Histogram:
        help_text, *labels = kind[name]
        if kind is COUNTERS:
            return Counter(name, help_text, labels, namespace="tidebook", registry=self.registry)
        if kind is GAUGES:
            return Gauge(name, help_text, labels, namespace="tidebook", registry=self.registry)
        return Histogram(
            f"{name}_seconds", help_text, labels, namespace="tidebook", registry=self.registry, buckets=BUCKETS_S
        )


@contextmanager
def serve_metrics(metrics: Metrics, address: str) -> Iterator[int]:
    """Serve the metrics over HTTP at host:port and yield the port; port 0 lets the system choose one."""
    host, _, port = address.rpartition(":")
    if not port.isascii() or not port.isdecimal() or int(port) > PORT_MAX:
        raise InvalidInput(f"the address of the metrics must be HOST:PORT, for example 127.0.0.1:9401, not {address!r}")
    try:
        server, thread = start_http_server(int(port), host.strip("[]") or "127.0.0.1", registry=metrics.registry)
    except (OSError, UnicodeError) as error:
        raise Unavailable(
            f"metrics cannot be served at {address}: {getattr(error, 'strerror', None) or error}"
        ) from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
