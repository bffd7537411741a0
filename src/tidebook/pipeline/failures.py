"""What made a Spark query fail, as one of our errors: they reach the driver as text, wrapped several times."""

from __future__ import annotations

import re

from tidebook.core.errors import (
    Corrupt,
    Fenced,
    InvalidInput,
    LogLost,
    NotFound,
    OutcomeUnknown,
    TidebookError,
    Unavailable,
)

_OURS = re.compile(r"tidebook\.core\.errors\.(\w+): ([^\n]*)")
_CLASSES: dict[str, type[TidebookError]] = {
    each.__name__: each for each in (Corrupt, Fenced, InvalidInput, NotFound, OutcomeUnknown, Unavailable)
}
_LOST = re.compile(r"(\S+)/(\d+): the log lost offsets (\d+) to (\d+)(?: before they were replicated)?(?:: (.*))?")
#: What Spark and Kafka's client say where a broker does not answer, or answers that it cannot just now. Where records
#: are lost Spark's source says the same as where it waited in vain: the next start tells the one from the other.
_KAFKA = re.compile(
    r"COULD_NOT_READ_OFFSET_RANGE|Cannot fetch record for offset|java\.util\.concurrent\.TimeoutException|"
    r"org\.apache\.kafka\.common\.errors\.(?:Retriable|Timeout|Disconnect|Network|NotLeaderOrFollower|"
    r"LeaderNotAvailable|ReplicaNotAvailable|BrokerNotAvailable|NotEnoughReplicas|KafkaStorage|FencedLeaderEpoch|"
    r"UnknownLeaderEpoch|UnknownTopicOrPartition|UnknownTopicId|CoordinatorNotAvailable|CoordinatorLoadInProgress|"
    r"NotCoordinator|OffsetNotAvailable|FetchSessionIdNotFound|InvalidFetchSessionEpoch|OffsetOutOfRange)\w*Exception"
)
#: What Spark says where a worker or an executor died.
_DIED = re.compile(
    r"exited unexpectedly|failed to connect back|waiting for the Python worker|ExecutorLost|executor.*(lost|exited)|"
    r"Connection reset|EOFException",
    re.I,
)
#: The last line of a Python traceback, which Spark sends along.
_RAISED = re.compile(r"^(?!py4j|pyspark|org\.|java)[A-Za-z_][\w.]*(?:Error|Exception)\b.*$", re.M)
_CHARS_MAX = 600


def failure_of(error: BaseException) -> TidebookError:
    """The cause that a query's error speaks of; Unavailable where the run may be tried again as it is."""
    if isinstance(error, TidebookError):
        return error
    text = str(error)
    found = _OURS.findall(text)
    if found:
        name, message = found[-1]
        if name in _CLASSES:
            return _CLASSES[name](message)
        lost = _LOST.search(message) if name == "LogLost" else None
        if lost is not None:
            topic, partition, first, last, remedy = lost.groups()
            return LogLost(topic=topic, partition=int(partition), first=int(first), last=int(last), remedy=remedy or "")
        return Corrupt(f"{name}: {message}")
    if _KAFKA.search(text):
        return Unavailable(f"the log does not answer the Spark job: {_short(text)}")
    raised = _RAISED.findall(text)
    if raised:
        return Corrupt(f"the Spark job failed: {raised[-1][:_CHARS_MAX]}")
    if _DIED.search(text):
        return Unavailable(f"a worker of the Spark job died: {_short(text)}")
    return Corrupt(f"the Spark job failed: {_short(text)}")


def may_pass(error: TidebookError) -> bool:
    """Whether another try may succeed with nothing changed by anybody."""
    return isinstance(error, Unavailable | OutcomeUnknown | Fenced)


def _short(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return " ".join(lines)[:_CHARS_MAX]
