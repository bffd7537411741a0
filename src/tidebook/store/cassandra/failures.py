"""Every failure of the driver, as one of Tidebook's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from acsylla import errors

from tidebook.core.errors import Corrupt, InvalidInput, OutcomeUnknown, TidebookError, Unavailable

#: No node took the request, or the one that did refused to begin with it.
NOT_DONE: Final = (
    errors.CassErrorLibNoHostsAvailable,
    errors.CassErrorLibHostResolution,
    errors.CassErrorLibUnableToConnect,
    errors.CassErrorLibRequestQueueFull,
    errors.CassErrorLibNoStreams,
    errors.CassErrorLibNoAvailableIoThread,
    errors.CassErrorServerUnavailable,
    errors.CassErrorServerOverloaded,
    errors.CassErrorServerIsBootstrapping,
)
#: Nothing is wrong with the request itself: the same one may succeed later.
PASSING: Final = (
    *NOT_DONE,
    errors.CassErrorLibRequestTimedOut,
    errors.CassErrorLibWriteError,
    errors.CassErrorLibUnexpectedResponse,
    errors.CassErrorServerReadTimeout,
    errors.CassErrorServerReadFailure,
    errors.CassErrorServerWriteTimeout,
    errors.CassErrorServerWriteFailure,
    errors.CassErrorServerServerError,
    errors.CassErrorSslClosed,
)
#: A read that took too long, for whatever reason.
TIMED_OUT: Final = (
    errors.CassErrorLibRequestTimedOut,
    errors.CassErrorServerReadTimeout,
    errors.CassErrorServerReadFailure,
)
_REFUSED: Final = (errors.CassErrorServerBadCredentials, errors.CassErrorServerUnauthorized)


@contextmanager
def translated(what: str, *, wrote: bool = False) -> Iterator[None]:
    """Raise the driver's failures as Tidebook's; `wrote` says that an unanswered request may have had an effect."""
    try:
        yield
    except errors.CassException as error:
        raise translate(error, what, wrote=wrote) from error


def translate(error: errors.CassException, what: str, *, wrote: bool = False) -> TidebookError:
    """What a failure of the driver means to whoever asked."""
    told = " ".join(str(error).split())
    if isinstance(error, _REFUSED) or "username and/or password" in told or "Bad credentials" in told:
        return InvalidInput(f"Cassandra refuses {what}: {told}: check user and password in [store]")
    if isinstance(error, errors.CassErrorSourceSsl) and not isinstance(error, PASSING):
        return InvalidInput(f"Cassandra's certificate or ours does not serve for {what}: {told}: check [store]")
    if isinstance(error, NOT_DONE) or (isinstance(error, PASSING) and not wrote):
        return Unavailable(f"Cassandra does not serve {what}: {told}: it is tried anew with the next call")
    if isinstance(error, PASSING):
        return OutcomeUnknown(f"Cassandra did not acknowledge {what}: {told}: do it again")
    return Corrupt(f"Cassandra refuses {what}: {told}: is the keyspace as Tidebook made it?")
