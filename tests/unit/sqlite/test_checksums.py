"""A flipped bit anywhere in a file is an error, and never a wrong or a missing row."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import apsw
import msgspec
import pytest

from tidebook.core.errors import Corrupt
from tidebook.sqlite.checksums import connect, has_checksums
from tidebook.sqlite.database import Database, Schema
from tidebook.sqlite.errors import from_sqlite

ONE = Schema(name="numbers", application_id=77, steps=("CREATE TABLE number (n INTEGER PRIMARY KEY, filling BLOB)",))
ROWS = [(n, bytes([n % 251]) * 300) for n in range(400)]
FLIPS = 120
PAGE_BYTES = 4096


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "numbers.db"


def fill(path: Path, schema: Schema = ONE) -> None:
    database = Database(path, schema)
    with database.writing as connection:
        connection.executemany("INSERT INTO number VALUES (?, ?)", ROWS)
    database.close()


def read(path: Path) -> list[tuple[int, bytes]]:
    """Return all rows, after reading them both by a scan and one by one."""
    database = Database(path, ONE)
    try:
        with database.reading() as connection:
            rows = [(int(n), bytes(filling)) for n, filling in connection.execute("SELECT * FROM number")]
            for n, filling in ROWS:
                found = connection.execute("SELECT filling FROM number WHERE n = ?", (n,)).get
                assert found == filling
        return rows
    except apsw.Error as error:
        raise from_sqlite(error, path) from error
    finally:
        database.close()


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(data)


def test_a_flipped_bit_anywhere_in_a_file_is_corrupt(path: Path) -> None:
    fill(path)
    sound = path.read_bytes()
    assert len(sound) > 20 * PAGE_BYTES
    flips = random.Random(7).sample(range(len(sound) * 8), FLIPS)
    for bit in [*flips, 20 * 8 + 3]:  # byte 20 marks pages as having checksums
        path.write_bytes(sound)
        flip(path, bit)
        with pytest.raises(Corrupt):
            read(path)
    path.write_bytes(sound)
    assert read(path) == ROWS


def test_a_flipped_bit_in_a_file_with_small_pages_is_corrupt(path: Path) -> None:
    fill(path, msgspec.structs.replace(ONE, page_bytes=1024))
    sound = path.read_bytes()
    assert int.from_bytes(sound[16:18], "big") == 1024
    for bit in random.Random(8).sample(range(len(sound) * 8), FLIPS // 4):
        path.write_bytes(sound)
        flip(path, bit)
        with pytest.raises(Corrupt):
            read(path)
    path.write_bytes(sound)
    assert read(path) == ROWS


def test_a_flipped_bit_is_listed_as_damage(path: Path) -> None:
    fill(path)
    flip(path, 8 * (10 * PAGE_BYTES + 2_000))
    database = Database(path, ONE)
    assert database.damage()
    database.close()


def leave_wal(path: Path, commits: int) -> Path:
    """Leave commits that are only in the write-ahead log, as after a crash, and return its path."""
    script = f"""
import os, pathlib
from tidebook.sqlite.checksums import connect
connection = connect(pathlib.Path({str(path)!r}))
connection.execute("PRAGMA wal_autocheckpoint = 0").fetchall()
for n in range({commits}):
    connection.execute("INSERT INTO number VALUES (?, zeroblob(1000))", (1000 + n,))
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    path.with_name(path.name + "-shm").unlink()
    return path.with_name(path.name + "-wal")


def test_a_flipped_bit_in_a_synced_commit_of_the_write_ahead_log_is_corrupt(path: Path) -> None:
    fill(path)
    wal = leave_wal(path, 5)
    sound = wal.read_bytes()
    in_first_page = 32 + 24 + 100
    flip(wal, 8 * in_first_page)
    damaged = wal.read_bytes()
    with pytest.raises(Corrupt, match="damaged at frame 1"):
        Database(path, ONE)
    assert wal.read_bytes() == damaged
    wal.write_bytes(sound)
    path.with_name(path.name + "-shm").unlink(missing_ok=True)
    Database(path, ONE).close()


def test_a_torn_last_commit_of_the_write_ahead_log_is_no_damage(path: Path) -> None:
    fill(path)
    wal = leave_wal(path, 5)
    wal.write_bytes(wal.read_bytes()[: -PAGE_BYTES // 2])
    Database(path, ONE).close()


def test_a_damaged_last_commit_is_taken_for_one_that_was_never_synced(path: Path) -> None:
    fill(path)
    wal = leave_wal(path, 5)
    flip(wal, 8 * (wal.stat().st_size - 100))
    Database(path, ONE).close()


def test_other_users_of_apsw_keep_their_default_file_system(path: Path) -> None:
    fill(path)
    other = apsw.Connection(":memory:")
    assert apsw.vfs_names()[0] != "cksmvfs"
    other.close()


def test_every_new_file_has_checksums(path: Path) -> None:
    fill(path)
    connection = connect(path)
    assert has_checksums(connection)
    connection.close()
