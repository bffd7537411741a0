"""A producer whose fatal error cannot get lost."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

LOGGER = logging.getLogger("tidebook.outbox")
LINES_MAX = 100
_FATAL = "Fatal error: "


class RelayProducer(Producer):
    """Keeps what the client says of a fatal error.

    The client raises it out of `poll` and `flush`, and goes on to call callbacks while it is on its way out. Every call
    that they make fails then, a lock that they take is never let go of, and the error itself is wrapped or lost. What
    the client logs of it comes first: callbacks only keep it, and it is told once the client has returned.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._lines: deque[tuple[int, tuple[str, ...]]] = deque(maxlen=LINES_MAX)
        self._fatal = ""
        super().__init__(dict(config), logger=self)

    def log(self, level: int, form: str, *parts: str) -> None:
        """Called by the client, as a logger's method would be."""
        self._lines.append((level, parts))

    def fatal(self) -> str:
        """What was said of a fatal error; empty where there was none."""
        self.tell()
        return self._fatal

    def tell(self) -> None:
        """Pass on what the client said."""
        while self._lines:
            level, parts = self._lines.popleft()
            LOGGER.log(level, "outbox: %s", " ".join(parts))
            if _FATAL in parts[-1]:
                self._fatal = self._fatal or parts[-1].partition(_FATAL)[2]


def fatal_cause(error: BaseException, producer: RelayProducer) -> KafkaError:
    """The error inside. Each callback that a fatal one met on its way out has wrapped it once more, or lost it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, KafkaException):
            failure: KafkaError = cause.args[0]
            return failure
        cause = cause.__cause__ or cause.__context__
    return KafkaError(KafkaError._FATAL, producer.fatal() or str(error))
