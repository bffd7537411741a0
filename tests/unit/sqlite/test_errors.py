"""Errors of SQLite and of the file system are translated into Tidebook's, which say what to do."""

from __future__ import annotations

import errno
from pathlib import Path

import apsw
import pytest

from tidebook.core.errors import Corrupt, InvalidInput, OutcomeUnknown, TidebookError, Unavailable
from tidebook.sqlite.errors import from_commit, from_os, from_sqlite

PATH = Path("book/log.db")


def failure(result: int) -> apsw.Error:
    error = apsw.exception_for(result)
    assert isinstance(error, apsw.Error)
    return error


@pytest.mark.parametrize(
    ("result", "kind"),
    [
        (apsw.SQLITE_FULL, Unavailable),
        (apsw.SQLITE_CORRUPT, Corrupt),
        (apsw.SQLITE_NOTADB, Corrupt),
        (apsw.SQLITE_IOERR_CORRUPTFS, Corrupt),
        (apsw.SQLITE_BUSY, Unavailable),
        (apsw.SQLITE_LOCKED, Unavailable),
        (apsw.SQLITE_READONLY, Unavailable),
        (apsw.SQLITE_CANTOPEN, Unavailable),
        (apsw.SQLITE_IOERR_READ, Unavailable),
        (apsw.SQLITE_IOERR_FSYNC, Unavailable),
        (apsw.SQLITE_CONSTRAINT, Unavailable),
    ],
)
def test_a_failed_statement_has_changed_nothing(result: int, kind: type[TidebookError]) -> None:
    error = from_sqlite(failure(result), PATH)
    assert type(error) is kind
    assert str(PATH) in str(error)


@pytest.mark.parametrize("result", [apsw.SQLITE_IOERR_FSYNC, apsw.SQLITE_IOERR_DIR_FSYNC])
def test_only_a_failed_sync_makes_the_outcome_of_a_commit_unknown(result: int) -> None:
    assert type(from_commit(failure(result), PATH)) is OutcomeUnknown


@pytest.mark.parametrize("result", [apsw.SQLITE_FULL, apsw.SQLITE_BUSY, apsw.SQLITE_IOERR_WRITE])
def test_any_other_failed_commit_has_changed_nothing(result: int) -> None:
    assert type(from_commit(failure(result), PATH)) is Unavailable


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EACCES, InvalidInput),
        (errno.EROFS, InvalidInput),
        (errno.ENOTDIR, InvalidInput),
        (errno.EEXIST, InvalidInput),
        (errno.ENAMETOOLONG, InvalidInput),
        (errno.ENOSPC, Unavailable),
        (errno.EDQUOT, Unavailable),
        (errno.EIO, Unavailable),
        (errno.EMFILE, Unavailable),
    ],
)
def test_a_path_that_is_refused_is_invalid_input_and_other_failures_are_unavailable(
    number: int, kind: type[TidebookError]
) -> None:
    assert type(from_os(OSError(number, "reason"), PATH)) is kind
