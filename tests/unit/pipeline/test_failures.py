"""What a query's failure is taken for."""

from __future__ import annotations

import pytest

from tidebook.core.errors import Corrupt, LogLost, Unavailable
from tidebook.pipeline.failures import failure_of, may_pass

STAGE = (
    "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: Job aborted due to stage failure: Task 0: "
)


def test_records_that_the_log_has_lost_are_named_though_spark_wraps_the_error() -> None:
    lost = LogLost(topic="orders", partition=3, first=7, last=9, remedy="restore the log")
    found = failure_of(RuntimeError(f"{STAGE}\n  File x\ntidebook.core.errors.LogLost: {lost}\n\tat org.apache.spark"))
    assert isinstance(found, LogLost)
    assert (found.topic, found.partition, found.first, found.last) == ("orders", 3, 7, 9)
    assert str(found) == str(lost)
    assert not may_pass(found)


@pytest.mark.parametrize(
    "text",
    [
        "org.apache.spark.sql.kafka010.KafkaIllegalStateException: [KAFKA_DATA_LOSS.COULD_NOT_READ_OFFSET_RANGE] x",
        "java.util.concurrent.TimeoutException: Cannot fetch record for offset 7 in 120000 milliseconds",
        "org.apache.kafka.common.errors.TimeoutException: Timeout of 60000ms expired before the position for partition",
        "org.apache.kafka.common.errors.NotLeaderOrFollowerException: For requests intended only for the leader",
    ],
)
def test_a_broker_that_does_not_answer_is_waited_for(text: str) -> None:
    found = failure_of(RuntimeError(STAGE + text))
    assert isinstance(found, Unavailable)
    assert may_pass(found)


def test_what_nobody_knows_ends_the_job() -> None:
    found = failure_of(RuntimeError(f"{STAGE}org.apache.kafka.common.errors.SaslAuthenticationException: no"))
    assert isinstance(found, Corrupt)
    assert not may_pass(found)
