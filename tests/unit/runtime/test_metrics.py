"""Counters, gauges and durations."""

from __future__ import annotations

import threading

from tidebook.runtime.metrics import Metrics, Sample


def test_counters_add_up_by_their_labels() -> None:
    metrics = Metrics()
    metrics.count("reads", topic="a")
    metrics.count("reads", 2, topic="a")
    metrics.count("reads", topic="b", kind="x")
    assert metrics.counted("reads", topic="a") == 3
    assert metrics.counted("reads") == 4
    assert metrics.counted("reads", topic="c") == 0


def test_the_order_of_labels_does_not_matter() -> None:
    metrics = Metrics()
    metrics.count("reads", a=1, b=2)
    metrics.count("reads", b=2, a=1)
    assert [sample.value for sample in metrics.samples()] == [2]


def test_a_gauge_has_the_value_last_set() -> None:
    metrics = Metrics()
    metrics.gauge("lag", 5)
    metrics.gauge("lag", 3)
    assert list(metrics.samples()) == [Sample("lag", (), 3)]


def test_durations_have_a_count_a_sum_and_a_maximum() -> None:
    metrics = Metrics()
    for seconds in (0.5, 0.25, 0.0):
        metrics.time("append", seconds, topic="a")
    timing = metrics.timing("append", topic="a")
    assert (timing.count, timing.total_s, timing.max_s) == (3, 0.75, 0.5)


def test_samples_of_a_duration_have_three_names() -> None:
    metrics = Metrics()
    metrics.time("append", 0.5)
    assert {sample.name: sample.value for sample in metrics.samples()} == {
        "append_count": 1,
        "append_seconds_total": 0.5,
        "append_seconds_max": 0.5,
    }


def test_a_duration_that_was_never_recorded_is_0() -> None:
    assert Metrics().timing("append").count == 0


def test_no_count_is_lost_between_threads() -> None:
    metrics = Metrics()

    def count() -> None:
        for _ in range(2000):
            metrics.count("n")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.counted("n") == 8000
