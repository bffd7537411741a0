"""Opening a file creates it atomically, upgrades it, or refuses it with the reason; damage is never overwritten."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

from tidebook.core.errors import Corrupt, InvalidInput, Unavailable, UnknownVersion
from tidebook.sqlite.database import Database, Schema
from tidebook.sqlite.shared_files import SharedFile

ONE = Schema(name="numbers", application_id=77, steps=("CREATE TABLE number (n INTEGER, filling BLOB)",))
TWO = Schema(name="numbers", application_id=77, steps=(*ONE.steps, "ALTER TABLE number ADD COLUMN m INTEGER"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "numbers.db"


def fill(path: Path, rows: int, *, schema: Schema = ONE) -> None:
    database = Database(path, schema)
    with database.writing as connection:
        connection.execute("BEGIN")
        for n in range(rows):
            connection.execute("INSERT INTO number (n, filling) VALUES (?, zeroblob(1000))", (n,))
        connection.execute("COMMIT")
    database.close()


def leave_wal(path: Path, rows: int) -> None:
    """Leave rows that are only in the write-ahead log, as after a crash."""
    script = f"""
import os, pathlib
from tidebook.sqlite.checksums import connect
connection = connect(pathlib.Path({str(path)!r}))
connection.execute("PRAGMA wal_autocheckpoint = 0").fetchall()
connection.execute("BEGIN")
for n in range({rows}):
    connection.execute("INSERT INTO number (n, filling) VALUES (?, zeroblob(1000))", (n,))
connection.execute("COMMIT")
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def count(path: Path) -> int:
    database = Database(path, ONE)
    try:
        with database.reading() as connection:
            return int(connection.execute("SELECT count(*) FROM number").get)
    finally:
        database.close()


def test_a_new_file_is_in_wal_mode_and_fully_synced(path: Path) -> None:
    database = Database(path, ONE)
    with database.writing as writer, database.reading() as reader:
        assert writer.pragma("journal_mode") == "wal"
        assert writer.pragma("synchronous") == reader.pragma("synchronous") == 2
        assert (writer.pragma("application_id"), writer.pragma("user_version")) == (77, 1)
    database.close()


def test_a_commit_checkpoints_a_long_write_ahead_log(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database(path, ONE)
    with database.writing as connection:
        connection.execute("INSERT INTO number (n) VALUES (1)")
        frames, checkpointed = connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
        assert (frames > 0, checkpointed) == (True, 0)
        monkeypatch.setattr("tidebook.sqlite.database.CHECKPOINT_BYTES", 4_096)
        connection.execute("INSERT INTO number (n) VALUES (2)")
        frames, checkpointed = connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
        assert frames == checkpointed > 0
    database.close()


def test_a_failing_checkpoint_does_not_look_like_a_failed_commit(path: Path) -> None:
    script = f"""
import pathlib, apsw
class Files(apsw.VFS):
    def xOpen(self, name, flags):
        return File(base, name, flags)
class File(apsw.VFSFile):
    def __init__(self, base, name, flags):
        super().__init__(base, name, flags)
        self.is_main = flags[0] & apsw.SQLITE_OPEN_MAIN_DB
    def xWrite(self, data, offset):
        if full and self.is_main:
            failed.append(offset)
            raise apsw.FullError("database or disk is full")
        super().xWrite(data, offset)
full, failed, base = False, [], apsw.vfs_names()[0]
files = Files("full", base, makedefault=True)
from tidebook.sqlite import database
from tests.unit.sqlite.test_database import ONE
database.CHECKPOINT_BYTES = 4_096
file = database.Database(pathlib.Path({str(path)!r}), ONE)
full = True
with file.writing as connection:
    connection.execute("INSERT INTO number (n) VALUES (1)")
assert failed, "the commit has started a checkpoint"
full = False
file.close()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert count(path) == 1


def test_a_reader_cannot_write(path: Path) -> None:
    database = Database(path, ONE)
    with pytest.raises(apsw.ReadOnlyError), database.reading() as connection:
        connection.execute("INSERT INTO number (n) VALUES (1)")
    database.close()


def test_a_failed_creation_leaves_no_incomplete_file(path: Path) -> None:
    broken = Schema(name="numbers", application_id=77, steps=(*ONE.steps, "CREATE TABLE number (again)"))
    with pytest.raises(Unavailable):
        Database(path, broken)
    assert [each.name for each in path.parent.iterdir() if ".new-" in each.name or each.suffix == ".db"] == []
    fill(path, 1)
    assert count(path) == 1


def test_an_older_file_is_upgraded_and_keeps_its_rows(path: Path) -> None:
    fill(path, 3)
    database = Database(path, TWO)
    with database.writing as connection:
        assert connection.execute("SELECT count(*), count(m) FROM number").fetchall() == [(3, 0)]
        assert connection.pragma("user_version") == 2
    database.close()


def test_a_file_of_a_newer_version_is_refused(path: Path) -> None:
    fill(path, 1, schema=TWO)
    with pytest.raises(UnknownVersion) as raised:
        Database(path, ONE)
    assert (raised.value.version, raised.value.known) == (2, 1)


def test_a_file_of_another_program_is_refused(path: Path) -> None:
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    with pytest.raises(Corrupt, match="not Tidebook's"):
        Database(path, ONE)


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InvalidInput, match="folder"):
            SharedFile.open(folder, "numbers.db", ONE)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(InvalidInput):
        SharedFile.open("/proc/tidebook-book", "numbers.db", ONE)


def test_a_name_that_no_folder_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        SharedFile.open(tmp_path / ("x" * 300), "numbers.db", ONE)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _cut_in_the_header(path: Path) -> None:
    os.truncate(path, 50)


def _cut_in_the_middle(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)


def _garbage_header(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(os.urandom(4096) + data[4096:])


def _text(path: Path) -> None:
    path.write_text("this is not a database at all\n" * 200)


DAMAGES = [_empty, _cut_in_the_header, _cut_in_the_middle, _garbage_header, _text]


@pytest.fixture(params=[False, True], ids=["clean", "with a write-ahead file"])
def filled(request: pytest.FixtureRequest, path: Path) -> Path:
    fill(path, 50)
    if request.param:
        leave_wal(path, 5)
        assert path.with_name(path.name + "-wal").stat().st_size > 0
    return path


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: str(damage.__name__)[1:])
def test_a_damaged_file_is_refused_and_not_changed(filled: Path, damage: Callable[[Path], None]) -> None:
    damage(filled)
    wal = filled.with_name(filled.name + "-wal")
    before = (filled.read_bytes(), wal.read_bytes() if wal.exists() else None)
    for _ in range(2):
        with pytest.raises(Corrupt):
            Database(filled, ONE)
    assert (filled.read_bytes(), wal.read_bytes() if wal.exists() else None) == before


def test_a_missing_file_with_a_write_ahead_log_is_damage(filled: Path) -> None:
    filled.unlink()
    with pytest.raises(Corrupt):
        Database(filled, ONE)
    assert not filled.exists()


def test_a_damaged_write_ahead_log_is_refused(path: Path) -> None:
    fill(path, 3)
    leave_wal(path, 5)
    wal = path.with_name(path.name + "-wal")
    wal.write_bytes(os.urandom(32) + wal.read_bytes()[32:])
    with pytest.raises(Corrupt):
        Database(path, ONE)


def test_commits_in_the_write_ahead_log_survive_a_crash(path: Path) -> None:
    fill(path, 3)
    leave_wal(path, 500)
    assert count(path) == 503


def test_a_read_of_a_damaged_page_raises_corrupt(path: Path) -> None:
    fill(path, 200)
    with path.open("r+b") as file:
        file.seek(4096 * 20)
        file.write(os.urandom(4096 * 10))
    database = Database(path, ONE)
    assert database.damage()
    with pytest.raises(apsw.Error) as caught, database.reading() as connection:
        connection.execute("SELECT sum(length(filling)) FROM number").fetchall()
    assert isinstance(database.failure(caught.value), Corrupt)
    database.close()


def test_a_sound_file_has_no_damage(path: Path) -> None:
    fill(path, 20)
    database = Database(path, ONE)
    assert database.damage() == []
    database.close()


def test_one_folder_under_two_names_is_one_file(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    one, two = SharedFile.open(tmp_path / "real", "n.db", ONE), SharedFile.open(tmp_path / "link", "n.db", ONE)
    assert one is two
    one.release()
    assert not two.database.closed
    two.release()
    assert two.database.closed


def test_a_closed_file_is_refused(path: Path) -> None:
    database = Database(path, ONE)
    database.close()
    with pytest.raises(Unavailable), database.reading():
        pass
