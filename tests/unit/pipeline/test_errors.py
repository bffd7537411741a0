"""The errors that the driver rebuilds from the failure of a Spark query."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from tidebook.core.errors import Corrupt, LogLost, TidebookError, Unavailable
from tidebook.pipeline.errors import TRANSIENT, failure_of
from tidebook.pipeline.worker import SparkWorker, open_settings_store
from tidebook.wiring.settings import Settings

STAGE = (
    "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: Job aborted due to stage failure: Task 0: "
)


def spark_text(error: TidebookError) -> str:
    """Return the message that Spark has for an error raised by a worker."""

    async def fail() -> None:
        raise error

    worker = SparkWorker(Settings(Path()), open_settings_store)
    try:
        worker.run(fail())
    except TidebookError:
        return f"{STAGE}\n{traceback.format_exc()}\n\tat org.apache.spark"
    finally:
        worker._portal.close()
    raise AssertionError


def test_records_that_the_log_has_lost_are_named_although_spark_wraps_the_error() -> None:
    lost = LogLost(topic="orders", partition=3, first=7, last=9, remedy="restore the log")
    found = failure_of(RuntimeError(spark_text(lost)))
    assert isinstance(found, LogLost)
    assert (found.topic, found.partition, found.first, found.last) == ("orders", 3, 7, 9)
    assert str(found) == str(lost)
    assert not isinstance(found, TRANSIENT)


def test_the_fields_of_lost_records_are_not_read_from_a_sentence() -> None:
    """A topic, a remedy or a time with the text of another message does not change the fields."""
    lost = LogLost(topic="a", partition=0, first=1, last=2, remedy="b/9: the log lost offsets 5 to 6", when="\nlater")
    found = failure_of(RuntimeError(spark_text(lost)))
    assert isinstance(found, LogLost)
    assert (found.topic, found.partition, found.first, found.last) == ("a", 0, 1, 2)
    assert (found.remedy, found.when, str(found)) == (lost.remedy, lost.when, str(lost))


def test_a_message_of_several_lines_arrives_whole() -> None:
    found = failure_of(RuntimeError(spark_text(Unavailable("no answer\nfrom 10.0.0.1"))))
    assert isinstance(found, Unavailable)
    assert str(found) == "no answer\nfrom 10.0.0.1"


def test_an_error_without_a_report_is_not_rebuilt_from_the_text_of_its_traceback() -> None:
    found = failure_of(RuntimeError(f"{STAGE}\ntidebook.core.errors.Fenced: a newer epoch\n\tat org.apache.spark"))
    assert isinstance(found, Corrupt)
    assert str(found) == "the Spark job failed: tidebook.core.errors.Fenced: a newer epoch"


@pytest.mark.parametrize(
    "text",
    [
        "org.apache.spark.sql.kafka010.KafkaIllegalStateException: [KAFKA_DATA_LOSS.COULD_NOT_READ_OFFSET_RANGE] x",
        "java.util.concurrent.TimeoutException: Cannot fetch record for offset 7 in 120000 milliseconds",
        "org.apache.kafka.common.errors.TimeoutException: Timeout of 60000ms expired before the position for partition",
        "org.apache.kafka.common.errors.NotLeaderOrFollowerException: For requests intended only for the leader",
    ],
)
def test_an_unavailable_broker_is_transient(text: str) -> None:
    found = failure_of(RuntimeError(STAGE + text))
    assert isinstance(found, Unavailable)
    assert isinstance(found, TRANSIENT)


def test_an_unknown_failure_is_not_transient() -> None:
    found = failure_of(RuntimeError(f"{STAGE}org.apache.kafka.common.errors.SaslAuthenticationException: no"))
    assert isinstance(found, Corrupt)
    assert not isinstance(found, TRANSIENT)
