"""What SQLite and the file system report becomes one of Tidebook's errors, and says what to do."""

from __future__ import annotations

import errno
from pathlib import Path

import apsw
import pytest

from tidebook.core.errors import Corrupt, InvalidInput, OutcomeUnknown, TidebookError, Unavailable
from tidebook.folder.failures import from_commit, from_os, from_sqlite

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
    told = from_sqlite(failure(result), PATH)
    assert type(told) is kind
    assert str(PATH) in str(told)


@pytest.mark.parametrize("result", [apsw.SQLITE_IOERR_FSYNC, apsw.SQLITE_IOERR_DIR_FSYNC])
def test_only_an_unconfirmed_sync_leaves_a_commit_open(result: int) -> None:
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
def test_what_the_file_system_refuses_is_bad_input_and_what_fails_is_unavailable(
    number: int, kind: type[TidebookError]
) -> None:
    assert type(from_os(OSError(number, "told"), PATH)) is kind
