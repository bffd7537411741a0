"""The system clock and random ids."""

from __future__ import annotations

import os
import time

from tidebook.runtime.clock import RandomIds, SystemClock


def test_the_system_clock_is_in_milliseconds() -> None:
    assert abs(SystemClock().now_ms() - time.time() * 1000) < 60_000


def test_ids_are_16_bytes_and_never_the_same() -> None:
    sources = [RandomIds(), RandomIds()]
    drawn = [source.new() for source in sources for _ in range(1000)]
    assert {len(id) for id in drawn} == {16}
    assert len(set(drawn)) == 2000


def test_a_forked_process_draws_other_ids_than_its_parent() -> None:
    ids = RandomIds()
    ids.new()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write_end, ids.new())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read_end, 16) != ids.new()
    os.close(read_end)
    os.close(write_end)
