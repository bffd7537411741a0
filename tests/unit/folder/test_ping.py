"""Wake-ups: nobody sleeps through one, and whoever is gone is forgotten."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidebook.folder import ping
from tidebook.folder.listeners import Listeners
from tidebook.folder.ping import Pings


@pytest.fixture
def pings(tmp_path: Path) -> Iterator[Pings]:
    pings = Pings(tmp_path)
    yield pings
    pings.close()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Pings]:
    """As another process would have it."""
    pings = Pings(tmp_path)
    yield pings
    pings.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is not woken does not come back: the poll would hide it."""
    monkeypatch.setattr(ping, "POLL_S", 1000.0)


async def listening(pings: Pings, channel: str) -> asyncio.Task[None]:
    task = asyncio.create_task(pings.wait(channel, since=pings.count(channel), timeout_s=1000))
    await asyncio.sleep(0)
    return task


@pytest.mark.usefixtures("patient")
async def test_a_ping_wakes_who_waits_in_this_process(pings: Pings) -> None:
    waiting = await listening(pings, "a")
    pings.ping(["a"])
    await waiting


@pytest.mark.usefixtures("patient")
async def test_a_ping_wakes_who_waits_in_another_process(pings: Pings, other: Pings) -> None:
    for _ in range(20):
        waiting = await listening(pings, "a")
        other.ping(["b", "a"])
        other.flush()
        await waiting


@pytest.mark.usefixtures("patient")
async def test_a_ping_before_the_wait_is_not_slept_through(pings: Pings) -> None:
    since = pings.count("a")
    pings.ping(["a"])
    await pings.wait("a", since=since, timeout_s=1000)


@pytest.mark.usefixtures("patient")
async def test_pings_in_quick_succession_are_sent_together_and_none_is_lost(pings: Pings, other: Pings) -> None:
    sleepers = [await listening(pings, f"c{n}") for n in range(2000)]
    for n in range(2000):
        other.ping([f"c{n}"])
    other.flush()
    await asyncio.gather(*sleepers)


async def test_a_wait_ends_by_itself(pings: Pings) -> None:
    await pings.wait("a", since=0, timeout_s=0.01)


@pytest.mark.usefixtures("patient")
async def test_who_does_not_know_the_secret_wakes_nobody(pings: Pings) -> None:
    waiting = await listening(pings, "a")
    stranger = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for datagram in (b"", b"a", b"\x00" * 16 + b"a", b"x" * 5000):
        stranger.sendto(datagram, ("127.0.0.1", pings._port))
    stranger.close()
    assert pings.count("a") == 0
    pings.ping(["a"])
    await waiting


async def test_a_listener_that_died_is_cleared_away(tmp_path: Path, pings: Pings, other: Pings) -> None:
    await listening(other, "a")
    folder = tmp_path / "listeners"
    (folder / "65000").write_bytes(b"")
    listeners = Listeners(tmp_path)
    assert listeners.ports() == (other._port,)
    assert not (folder / "65000").exists()
    assert (folder / str(other._port)).exists()


async def test_who_closes_leaves_the_list_and_wakes_his_own(tmp_path: Path) -> None:
    pings = Pings(tmp_path)
    waiting = await listening(pings, "a")
    assert Listeners(tmp_path).ports() != ()
    await asyncio.to_thread(pings.close)
    await waiting
    assert Listeners(tmp_path).ports() == ()


async def test_all_processes_of_a_folder_share_a_secret(tmp_path: Path) -> None:
    found: set[bytes] = set()
    makers = [threading.Thread(target=lambda: found.add(Listeners(tmp_path).secret)) for _ in range(8)]
    for each in makers:
        each.start()
    for each in makers:
        each.join()
    assert len(found) == 1
    assert (tmp_path / "listeners" / "secret").stat().st_mode & 0o077 == 0


async def test_a_secret_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    Listeners(tmp_path)
    (tmp_path / "listeners" / "secret").write_bytes(b"short")
    assert len(Listeners(tmp_path).secret) == 16


async def test_waiting_goes_on_where_nobody_can_listen(pings: Pings, tmp_path: Path) -> None:
    folder = tmp_path / "listeners"
    folder.rename(tmp_path / "away")
    await pings.wait("a", since=0, timeout_s=0.01)
    waiting = await listening(pings, "a")
    pings.ping(["a"])
    await waiting


@pytest.mark.usefixtures("patient")
async def test_one_that_joins_within_the_same_tick_of_the_clock_is_woken(tmp_path: Path, pings: Pings) -> None:
    waiting = await listening(pings, "a")
    folder = tmp_path / "listeners"
    sender = Listeners(tmp_path)
    assert len(sender.ports()) == 1
    changed = folder.stat()
    other = Pings(tmp_path)
    second = await listening(other, "a")
    os.utime(folder, ns=(changed.st_atime_ns, changed.st_mtime_ns))
    assert len(sender.ports()) == 2
    pings.ping(["a"])
    other.ping(["a"])
    await asyncio.gather(waiting, second)
    other.close()


def test_processes_that_open_a_new_folder_at_once_agree_on_its_secret(tmp_path: Path) -> None:
    for n in range(20):
        found: list[bytes] = []
        start = threading.Barrier(4)

        def look(
            folder: Path = tmp_path / str(n), start: threading.Barrier = start, found: list[bytes] = found
        ) -> None:
            start.wait()
            found.append(Listeners(folder).secret)

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(found)) == 1
