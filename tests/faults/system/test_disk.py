"""The disks of a run fail as the schedule says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SMALL = """
import errno, sys
from pathlib import Path
from faults.disk import SmallDisk
folder = Path(sys.argv[1])
disk = SmallDisk.mount(folder)
if disk is None:
    print("not allowed")
    sys.exit()
def write():
    with open(folder / "file", "ab") as file:
        file.write(bytes(100_000))
write()
disk.fill()
try:
    write()
except OSError as error:
    assert error.errno == errno.ENOSPC
    print("full", end=" ")
disk.make_room()
write()
print("room")
"""
FAULTY = """
import random, sys
from faults.disk import install_faulty_files
disk = install_faulty_files(random.Random(1))
import apsw
from tidebook.sqlite import checksums
connection = checksums.connect(sys.argv[1])
checksums.reserve_checksums(connection)
connection.pragma("journal_mode", "wal")
connection.pragma("synchronous", "full")
connection.execute("CREATE TABLE t (n INTEGER)")
disk.is_faulty = True
failed = kept = 0
for number in range(50):
    try:
        connection.execute("INSERT INTO t VALUES (?)", (number,))
        kept += 1
    except apsw.IOError:
        failed += 1
disk.is_faulty = False
assert failed > 5 and kept > 5, (failed, kept)
[[count]] = connection.execute("SELECT count(*) FROM t")
assert count == kept, (count, kept)
print("ok")
"""


def run(program: str, path: Path) -> str:
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(path)],
        cwd=root, env={"PYTHONPATH": f"{root}:{root / 'src'}", "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_small_disk_is_full_and_has_room_again(tmp_path: Path) -> None:
    found = run(SMALL, tmp_path / "disk")
    if found == "not allowed":
        pytest.skip("this user may not mount a file system")
    assert found == "full room"
    assert not list((tmp_path / "disk").iterdir())  # the disk was mounted only in the other process


def test_files_fail_and_keep_what_they_have_confirmed(tmp_path: Path) -> None:
    assert run(FAULTY, tmp_path / "file.db") == "ok"
