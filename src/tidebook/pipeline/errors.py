"""Errors of Spark jobs: pass them from the Python workers to the driver, and retry transient ones.

Spark reports a worker's exception as the text of its traceback. The worker therefore attaches the error's fields to the
exception as a line of JSON, which the driver decodes.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

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
from tidebook.pipeline.stoppable_portal import StoppablePortal
from tidebook.runtime.backoff import Backoff
from tidebook.runtime.blocking_portal import BlockingPortal

T = TypeVar("T")

_PREFIX = "tidebook-error: "
_REPORT = re.compile(rf"{_PREFIX}(\{{.*\}})")
_CLASSES: dict[str, type[TidebookError]] = {
    each.__name__: each for each in (Corrupt, Fenced, InvalidInput, NotFound, OutcomeUnknown, Unavailable)
}
#: Messages of Spark and the Kafka client for a broker that is unavailable. Spark's source reports lost records with the
#: same message as a timeout; the checks before the query starts again tell them apart.
_KAFKA = re.compile(
    r"COULD_NOT_READ_OFFSET_RANGE|Cannot fetch record for offset|java\.util\.concurrent\.TimeoutException|"
    r"org\.apache\.kafka\.common\.errors\.(?:Retriable|Timeout|Disconnect|Network|NotLeaderOrFollower|"
    r"LeaderNotAvailable|ReplicaNotAvailable|BrokerNotAvailable|NotEnoughReplicas|KafkaStorage|FencedLeaderEpoch|"
    r"UnknownLeaderEpoch|UnknownTopicOrPartition|UnknownTopicId|CoordinatorNotAvailable|CoordinatorLoadInProgress|"
    r"NotCoordinator|OffsetNotAvailable|FetchSessionIdNotFound|InvalidFetchSessionEpoch|OffsetOutOfRange)\w*Exception"
)
#: Messages of Spark for a worker or an executor that died.
_DIED = re.compile(
    r"exited unexpectedly|failed to connect back|waiting for the Python worker|ExecutorLost|executor.*(lost|exited)|"
    r"Connection reset|EOFException",
    re.I,
)
#: The last line of a Python traceback in Spark's message.
_PYTHON_ERROR = re.compile(
    r"^(?!py4j|pyspark|org\.|java)(?:[A-Za-z_][\w.]*(?:Error|Exception)|tidebook\.core\.errors\.\w+)\b.*$", re.M
)
_CHARS_MAX = 600
#: Errors after which a retry may succeed without any intervention.
TRANSIENT = (Unavailable, OutcomeUnknown, Fenced)
RETRY_FIRST_S = 0.5
RETRY_MAX_S = 15.0


class ErrorReport(msgspec.Struct, frozen=True):
    """An error of a worker, as the driver receives it."""

    name: str
    message: str
    #: The arguments of a `LogLost`.
    lost: dict[str, Any] | None = None


def attach_report(error: TidebookError) -> None:
    """Attach the error's fields to it as a note, which is a part of the traceback that Spark passes to the driver."""
    lost = vars(error) if isinstance(error, LogLost) else None
    if lost is not None:
        lost = {name: lost[name] for name in ("topic", "partition", "first", "last", "remedy", "when")}
    note = _PREFIX + msgspec.json.encode(ErrorReport(type(error).__name__, str(error), lost)).decode()
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def failure_of(error: BaseException) -> TidebookError:
    """Translate the error of a query or a lease.

    Return the worker's error if it was reported, `Unavailable` if the log or a worker failed, and otherwise `Corrupt`.
    """
    if isinstance(error, TidebookError):
        return error
    text = str(error)
    if (report := _last_report(text)) is not None:
        if report.lost is not None:
            return LogLost(**report.lost)
        if report.name in _CLASSES:
            return _CLASSES[report.name](report.message)
        return Corrupt(f"{report.name}: {report.message}")
    short = " ".join(line for line in text.strip().splitlines() if line.strip())[:_CHARS_MAX]
    if _KAFKA.search(text):
        return Unavailable(f"the log is unavailable to the Spark job: {short}")
    if raised := _PYTHON_ERROR.findall(text):
        return Corrupt(f"the Spark job failed: {raised[-1][:_CHARS_MAX]}")
    if _DIED.search(text):
        return Unavailable(f"a worker of the Spark job died: {short}")
    return Corrupt(f"the Spark job failed: {short}")


def _last_report(text: str) -> ErrorReport | None:
    for found in reversed(_REPORT.findall(text)):
        try:
            return msgspec.json.decode(found, type=ErrorReport)
        except msgspec.DecodeError:
            continue  # Spark has truncated the text
    return None


def run_with_retries(
    portal: BlockingPortal | StoppablePortal,
    call: Callable[[], Coroutine[Any, Any, T]],
    *,
    stop: threading.Event,
    report: Callable[[str, float], None],
    within_s: float | None = None,
) -> T:
    """Run a coroutine on the portal's loop; retry with backoff while its error is transient.

    Before each pause, call `report` with the reason and the seconds elapsed so far. Raise a transient error only if
    `stop` is set or `within_s` has elapsed, and any other one at once.
    """
    began, backoff = time.monotonic(), Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S)
    while True:
        try:
            return portal.run(call())
        except TRANSIENT as error:
            waited_s = time.monotonic() - began
            if stop.is_set() or (within_s is not None and waited_s >= within_s):
                raise
            report(str(error), waited_s)
            stop.wait(backoff.next_s())
