"""No waiter misses a wake-up, and dead listeners are removed."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidebook.sqlite import wakeups as wakeups_module
from tidebook.sqlite.wakeups import Listeners, Wakeups


@pytest.fixture
def wakeups(tmp_path: Path) -> Iterator[Wakeups]:
    wakeups = Wakeups(tmp_path)
    yield wakeups
    wakeups.close()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Wakeups]:
    """The wake-ups of another process."""
    wakeups = Wakeups(tmp_path)
    yield wakeups
    wakeups.close()


@pytest.fixture
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable polling, which would hide a lost wake-up."""
    monkeypatch.setattr(wakeups_module, "POLL_S", 1000.0)


async def listening(wakeups: Wakeups, channel: str) -> asyncio.Task[None]:
    task = asyncio.create_task(wakeups.wait(channel, since=wakeups.count(channel), timeout_s=1000))
    await asyncio.sleep(0)
    return task


@pytest.mark.usefixtures("no_polling")
async def test_a_ping_wakes_a_waiter_of_this_process(wakeups: Wakeups) -> None:
    waiting = await listening(wakeups, "a")
    wakeups.ping(["a"])
    await waiting


@pytest.mark.usefixtures("no_polling")
async def test_a_ping_wakes_a_waiter_of_another_process(wakeups: Wakeups, other: Wakeups) -> None:
    for _ in range(20):
        waiting = await listening(wakeups, "a")
        other.ping(["b", "a"])
        other.flush()
        await waiting


@pytest.mark.usefixtures("no_polling")
async def test_a_ping_before_the_wait_is_not_missed(wakeups: Wakeups) -> None:
    since = wakeups.count("a")
    wakeups.ping(["a"])
    await wakeups.wait("a", since=since, timeout_s=1000)


@pytest.mark.usefixtures("no_polling")
async def test_pings_in_quick_succession_are_coalesced_and_none_is_lost(wakeups: Wakeups, other: Wakeups) -> None:
    waiters = [await listening(wakeups, f"c{n}") for n in range(2000)]
    for n in range(2000):
        other.ping([f"c{n}"])
    other.flush()
    await asyncio.gather(*waiters)


async def test_a_wait_times_out(wakeups: Wakeups) -> None:
    await wakeups.wait("a", since=0, timeout_s=0.01)


@pytest.mark.usefixtures("no_polling")
async def test_a_datagram_without_the_secret_wakes_no_waiter(wakeups: Wakeups) -> None:
    waiting = await listening(wakeups, "a")
    stranger = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for datagram in (b"", b"a", b"\x00" * 16 + b"a", b"x" * 5000):
        stranger.sendto(datagram, ("127.0.0.1", wakeups._port))
    stranger.close()
    assert wakeups.count("a") == 0
    wakeups.ping(["a"])
    await waiting


async def test_a_dead_listener_is_removed(tmp_path: Path, wakeups: Wakeups, other: Wakeups) -> None:
    await listening(other, "a")
    folder = tmp_path / "listeners"
    (folder / "65000").write_bytes(b"")
    listeners = Listeners(tmp_path)
    assert listeners.ports() == (other._port,)
    assert not (folder / "65000").exists()
    assert (folder / str(other._port)).exists()


async def test_close_unregisters_the_listener_and_wakes_its_waiters(tmp_path: Path) -> None:
    wakeups = Wakeups(tmp_path)
    waiting = await listening(wakeups, "a")
    assert Listeners(tmp_path).ports() != ()
    await asyncio.to_thread(wakeups.close)
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


async def test_a_truncated_secret_is_replaced(tmp_path: Path) -> None:
    Listeners(tmp_path)
    (tmp_path / "listeners" / "secret").write_bytes(b"short")
    assert len(Listeners(tmp_path).secret) == 16


async def test_waiting_works_without_a_listener(wakeups: Wakeups, tmp_path: Path) -> None:
    folder = tmp_path / "listeners"
    folder.rename(tmp_path / "away")
    await wakeups.wait("a", since=0, timeout_s=0.01)
    waiting = await listening(wakeups, "a")
    wakeups.ping(["a"])
    await waiting


@pytest.mark.usefixtures("no_polling")
async def test_a_listener_that_joins_within_the_same_clock_tick_is_woken(tmp_path: Path, wakeups: Wakeups) -> None:
    waiting = await listening(wakeups, "a")
    folder = tmp_path / "listeners"
    sender = Listeners(tmp_path)
    assert len(sender.ports()) == 1
    changed = folder.stat()
    other = Wakeups(tmp_path)
    second = await listening(other, "a")
    os.utime(folder, ns=(changed.st_atime_ns, changed.st_mtime_ns))
    assert len(sender.ports()) == 2
    wakeups.ping(["a"])
    other.ping(["a"])
    await asyncio.gather(waiting, second)
    other.close()


def test_processes_that_open_a_new_folder_concurrently_agree_on_its_secret(tmp_path: Path) -> None:
    for n in range(20):
        found: list[bytes] = []
        start = threading.Barrier(4)

        def read_secret(
            folder: Path = tmp_path / str(n), start: threading.Barrier = start, found: list[bytes] = found
        ) -> None:
            start.wait()
            found.append(Listeners(folder).secret)

        threads = [threading.Thread(target=read_secret) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(found)) == 1
