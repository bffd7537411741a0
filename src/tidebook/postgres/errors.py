"""Translate psycopg's errors into Tidebook's."""

from __future__ import annotations

import psycopg
from psycopg import errors
from psycopg_pool import PoolClosed, PoolTimeout

from tidebook.core.errors import Corrupt, InvalidInput, OutcomeUnknown, TidebookError, Unavailable

TEXT_MAX = 400
#: Nothing was changed, and a retry of the same statement may succeed.
TRANSIENT = (errors.SerializationFailure, errors.DeadlockDetected, errors.LockNotAvailable)
_WRONG = (
    errors.InvalidPassword,
    errors.InvalidAuthorizationSpecification,
    errors.InvalidCatalogName,
    errors.InsufficientPrivilege,
)
_MISSING = (errors.UndefinedTable, errors.UndefinedFunction, errors.UndefinedColumn, errors.InvalidSchemaName)


def one_line(error: psycopg.Error) -> str:
    """Return the error's message on one line, cut to `TEXT_MAX` characters; libpq writes a line per host."""
    return " ".join(str(error).split())[:TEXT_MAX] or type(error).__name__


def from_psycopg(error: psycopg.Error, *, writes: bool) -> TidebookError:
    """Return Tidebook's error for a failed statement; after a lost connection a write's outcome is unknown."""
    text = one_line(error)
    if isinstance(error, _WRONG):
        return InvalidInput(f"PostgreSQL refused: {text}: check the URL and the rights of its user")
    if isinstance(error, _MISSING):
        return Unavailable(f"a table of Tidebook is missing in PostgreSQL: {text}: open the book again")
    if isinstance(error, errors.DataCorrupted | errors.IndexCorrupted):
        return Corrupt(f"PostgreSQL reports damage: {text}")
    if writes and isinstance(error, errors.AdminShutdown | errors.CrashShutdown):
        # A commit that only waited for replicas has taken effect.
        return OutcomeUnknown(f"PostgreSQL shut down in the middle of a write: {text}")
    if isinstance(error, PoolTimeout | PoolClosed) or error.sqlstate is not None:
        return Unavailable(f"PostgreSQL: {text}")
    if writes and isinstance(error, psycopg.OperationalError):
        return OutcomeUnknown(f"the connection to PostgreSQL was lost in the middle of a write: {text}")
    return Unavailable(f"PostgreSQL does not answer: {text}")
