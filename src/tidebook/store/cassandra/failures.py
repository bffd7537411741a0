"""Every failure of the driver, as one of Tidebook's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

from acsylla import errors

from tidebook.core.errors import Corrupt, InvalidInput, OutcomeUnknown, TidebookError, Unavailable

#: The driver says so before it has sent anything, to any node.
NOT_SENT: Final = (
    errors.CassErrorLibHostResolution,
    errors.CassErrorLibUnableToConnect,
    errors.CassErrorLibRequestQueueFull,
    errors.CassErrorLibNoStreams,
    errors.CassErrorLibNoAvailableIoThread,
)
#: Nothing is wrong with the request itself: the same one may succeed later.
PASSING: Final = (
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
#: A read that did not come in time: it was too much, or nobody is there.
TOO_LATE: Final = (errors.CassErrorLibRequestTimedOut, errors.CassErrorServerReadTimeout)
#: A read that was too much for its time or its node, as far as one can tell.
TIMED_OUT: Final = (*TOO_LATE, errors.CassErrorServerReadFailure)
_REFUSED: Final = (errors.CassErrorServerBadCredentials, errors.CassErrorServerUnauthorized)

#: How often the driver may have sent what changes something: an idempotent statement goes to the next node when the
#: connection to one breaks, whether that one had it or not; any other is sent once.
Sent = Literal["once", "repeatedly"]


@contextmanager
def translated(what: str, *, wrote: Sent | None = None) -> Iterator[None]:
    """Raise the driver's failures as Tidebook's; `wrote` says that an unanswered request may have had an effect."""
    try:
        yield
    except errors.CassException as error:
        raise translate(error, what, wrote=wrote) from error


def translate(error: errors.CassException, what: str, *, wrote: Sent | None = None) -> TidebookError:
    """What a failure of the driver means to whoever asked."""
    told = " ".join(str(error).split())
    if isinstance(error, _REFUSED) or "username and/or password" in told or "Bad credentials" in told:
        return InvalidInput(f"Cassandra refuses {what}: {told}: check user and password in [store]")
    if isinstance(error, errors.CassErrorSourceSsl) and not isinstance(error, PASSING):
        return InvalidInput(f"Cassandra's certificate or ours does not serve for {what}: {told}: check [store]")
    if isinstance(error, PASSING):
        if _had_no_effect(error, wrote):
            return Unavailable(f"Cassandra does not serve {what}: {told}: it is tried anew with the next call")
        return OutcomeUnknown(f"Cassandra did not acknowledge {what}: {told}: do it again")
    return Corrupt(f"Cassandra refuses {what}: {told}: is the keyspace as Tidebook made it?")


def _had_no_effect(error: errors.CassException, wrote: Sent | None) -> bool:
    """Whether it is certain that nothing was changed."""
    match wrote:
        case None:
            return True
        case "once":
            # Not so "unavailable" or "overloaded": a node counts its peers once more for the commit of a
            # compare-and-set that is accepted already.
            return isinstance(error, (*NOT_SENT, errors.CassErrorLibNoHostsAvailable))
        case "repeatedly":
            return isinstance(error, NOT_SENT)
