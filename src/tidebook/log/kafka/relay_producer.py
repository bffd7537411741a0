"""A producer whose fatal error cannot get lost, and whose end nobody waits for."""

from __future__ import annotations

import _thread
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

LOGGER = logging.getLogger("tidebook.outbox")
LINES_MAX = 100
#: How many producers may be about to end, each in a thread, before no more are made.
ENDING_MAX = 32
_FATAL = "Fatal error: "
#: What the client says, with `debug = "eos"`, once an idempotent producer has its id.
_HAS_ID = "-> Assigned"
#: What the client thinks of our settings, at each start: they are meant.
_OF_SETTINGS = "CONFWARN"


class Said:
    """What the client says, kept. A producer that were its own logger would be a cycle: it would end, and wait for the
    end of its threads, in whichever thread the garbage is next collected.
    """

    def __init__(self) -> None:
        self.lines: deque[tuple[int, tuple[str, ...]]] = deque(maxlen=LINES_MAX)

    def log(self, level: int, form: str, *parts: str) -> None:
        """Called by the client, as a logger's method would be."""
        self.lines.append((level, parts))


#: What is about to end: producers, and calls that were given up.
_ending: set[object] = set()


def ending() -> int:
    """How many producers, and calls of the client that were given up, have not ended yet."""
    return len(_ending)


def _end(grave: list[RelayProducer]) -> None:
    mark = object()
    _ending.add(mark)
    grave.clear()  # the last reference: the client now waits for its threads, and for requests under way
    _ending.discard(mark)


class Call:
    """A call of the client that might never return, in a thread of its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, args=(call,), name="tidebook-outbox-call", daemon=True).start()

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()
            _ending.discard(self)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended, after so long at most."""
        return self._done.wait(timeout_s)

    def result(self) -> None:
        """Raise what it raised."""
        if self._error is not None:
            raise self._error

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        _ending.add(self)
        if self._done.is_set():
            _ending.discard(self)


class RelayProducer(Producer):
    """Keeps what the client says of a fatal error, and ends in a thread of its own.

    The end of a producer waits for the client's threads, and so for a broker that does not answer: a relay's thread
    would give no sign of life meanwhile.

    The client raises it out of `poll` and `flush`, and goes on to call callbacks while it is on its way out. Every call
    that they make fails then, a lock that they take is never let go of, and the error itself is wrapped or lost. What
    the client logs of it comes first: callbacks only keep it, and it is told once the client has returned.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.said = Said()
        self._fatal = ""
        self._has_id = False
        super().__init__(dict(config), logger=self.said)

    def __del__(self) -> None:
        with suppress(RuntimeError):  # the interpreter ends: so does the producer, here
            _thread.start_new_thread(_end, ([self],))

    def fatal(self) -> str:
        """What was said of a fatal error; empty where there was none."""
        self.tell()
        return self._fatal

    def has_id(self) -> bool:
        """Whether the broker has given it the id without which it cannot send; told to `debug = "eos"` alone."""
        self.tell()
        return self._has_id

    def tell(self) -> None:
        """Pass on what the client said."""
        lines = self.said.lines
        while lines:
            level, parts = lines.popleft()
            LOGGER.log(logging.DEBUG if parts[0] == _OF_SETTINGS else level, "outbox: %s", " ".join(parts))
            self._has_id = self._has_id or parts[-1].endswith(_HAS_ID)
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
