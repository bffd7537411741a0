"""What psycopg reports, as Tidebook's own errors."""

from __future__ import annotations

import psycopg
from psycopg import errors
from psycopg_pool import PoolClosed, PoolTimeout

from tidebook.core.errors import Corrupt, InvalidInput, OutcomeUnknown, TidebookError, Unavailable

#: Nothing was changed, and the same statement may well succeed at the next try.
PASSING = (errors.SerializationFailure, errors.DeadlockDetected, errors.LockNotAvailable)
_WRONG = (
    errors.InvalidPassword,
    errors.InvalidAuthorizationSpecification,
    errors.InvalidCatalogName,
    errors.InsufficientPrivilege,
)
_MISSING = (errors.UndefinedTable, errors.UndefinedFunction, errors.UndefinedColumn, errors.InvalidSchemaName)


def from_psycopg(error: psycopg.Error, *, writes: bool) -> TidebookError:
    """A failed statement; `writes` tells whether a lost connection leaves it open if it was carried out."""
    told = str(error).strip().partition("\n")[0] or type(error).__name__
    if isinstance(error, _WRONG):
        return InvalidInput(f"PostgreSQL refused: {told}: check the URL and the rights of its user")
    if isinstance(error, _MISSING):
        return Unavailable(f"PostgreSQL lacks a table that Tidebook made: {told}: open the book again")
    if isinstance(error, errors.DataCorrupted | errors.IndexCorrupted):
        return Corrupt(f"PostgreSQL reports damage: {told}")
    if writes and isinstance(error, errors.AdminShutdown | errors.CrashShutdown):
        # A commit that only waited for replicas is carried out all the same.
        return OutcomeUnknown(f"PostgreSQL shut down in the middle of a write: {told}")
    if isinstance(error, PoolTimeout | PoolClosed) or error.sqlstate is not None:
        return Unavailable(f"PostgreSQL: {told}")
    if writes and isinstance(error, psycopg.OperationalError):
        return OutcomeUnknown(f"the connection to PostgreSQL was lost in the middle of a write: {told}")
    return Unavailable(f"PostgreSQL does not answer: {told}")
