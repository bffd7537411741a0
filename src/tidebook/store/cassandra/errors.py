"""Translate the driver's errors into Tidebook's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

from acsylla import errors

from tidebook.core.errors import Corrupt, InvalidInput, OutcomeUnknown, TidebookError, Unavailable

#: Raised by the driver before it has sent the request to any node.
NOT_SENT: Final = (
    errors.CassErrorLibHostResolution,
    errors.CassErrorLibUnableToConnect,
    errors.CassErrorLibRequestQueueFull,
    errors.CassErrorLibNoStreams,
    errors.CassErrorLibNoAvailableIoThread,
)
#: The same request may succeed later.
TRANSIENT: Final = (
    *NOT_SENT,
    errors.CassErrorLibNoHostsAvailable,
    errors.CassErrorLibRequestTimedOut,
    errors.CassErrorLibWriteError,
    errors.CassErrorLibUnexpectedResponse,
    errors.CassErrorServerUnavailable,
    errors.CassErrorServerOverloaded,
    errors.CassErrorServerIsBootstrapping,
    errors.CassErrorServerReadTimeout,
    errors.CassErrorServerReadFailure,
    errors.CassErrorServerWriteTimeout,
    errors.CassErrorServerWriteFailure,
    errors.CassErrorServerServerError,
    errors.CassErrorSslClosed,
)
#: The read timed out: its page was too large, or nodes are down.
TIMEOUTS: Final = (errors.CassErrorLibRequestTimedOut, errors.CassErrorServerReadTimeout)
#: The read may have been too large: it timed out, or a node aborted it because of too many tombstones.
PERHAPS_TOO_LARGE: Final = (*TIMEOUTS, errors.CassErrorServerReadFailure)
_REFUSED: Final = (errors.CassErrorServerBadCredentials, errors.CassErrorServerUnauthorized)

#: How often the driver may have sent a write. It sends an idempotent statement to the next node when a connection
#: breaks, whether or not the first node had received it; any other statement is sent once.
WriteAttempts = Literal["once", "repeatedly"]


@contextmanager
def translated(request: str, *, attempts: WriteAttempts | None = None) -> Iterator[None]:
    """Translate the driver's errors; `attempts` is given for writes, which may take effect even without a response."""
    try:
        yield
    except errors.CassException as error:
        raise translate(error, request, attempts=attempts) from error


def translate(error: errors.CassException, request: str, *, attempts: WriteAttempts | None = None) -> TidebookError:
    """Return Tidebook's error for an error of the driver; `request` describes what failed."""
    message = " ".join(str(error).split())
    if isinstance(error, _REFUSED) or "username and/or password" in message or "Bad credentials" in message:
        return InvalidInput(f"Cassandra refuses {request}: {message}: check user and password in [store]")
    if isinstance(error, errors.CassErrorSourceSsl) and not isinstance(error, TRANSIENT):
        return InvalidInput(f"a TLS certificate was not accepted for {request}: {message}: check [store]")
    if isinstance(error, TRANSIENT):
        if _had_no_effect(error, attempts):
            return Unavailable(
                f"Cassandra is unavailable: {request}: {message}: check the address and the nodes, then retry"
            )
        return OutcomeUnknown(f"Cassandra did not acknowledge {request}: {message}: repeat it")
    return Corrupt(f"Cassandra refuses {request}: {message}: did another program change the keyspace?")


def _had_no_effect(error: errors.CassException, attempts: WriteAttempts | None) -> bool:
    """Return whether the request certainly changed nothing."""
    match attempts:
        case None:
            return True
        case "once":
            # "Unavailable" and "overloaded" do not count: a node checks its peers again to commit a compare-and-set
            # that is already accepted.
            return isinstance(error, (*NOT_SENT, errors.CassErrorLibNoHostsAvailable))
        case "repeatedly":
            return isinstance(error, NOT_SENT)
