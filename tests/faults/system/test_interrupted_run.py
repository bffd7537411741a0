"""A run that is interrupted stops its processes and servers, and checks what it has."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from faults import __main__ as command

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 100.0


@asynccontextmanager
async def run(folder: Path, *options: str) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "faults", "--minutes", "10", "--seed", "7", "--out", str(folder), *options),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield started
    finally:
        for pid in pids_of_session(started.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def running_in(folder: Path) -> list[str]:
    """Return the command lines of the processes that name the folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_text(errors="replace").replace("\0", " ")
        except OSError:  # the process has ended
            continue
        if str(folder) in command:
            found.append(command)
    return found


def pids_of_session(session: int) -> list[int]:
    """Return the processes of a session, except those that only have to be reaped."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session, *_ = file.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        if int(its_session) == session and state not in "ZX":
            found.append(int(file.parent.name))
    return found


async def session_ended(session: int) -> None:
    """Return once a session has no process: the interpreter's own helper processes end last."""
    while pids_of_session(session):  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def output_until(process: asyncio.subprocess.Process, text: str) -> None:
    assert process.stdout is not None
    lines = []
    while line := (await process.stdout.readline()).decode():
        lines.append(line)
        if text in line:
            return
    pytest.fail(f"ended before {text!r}:\n{''.join(lines)}")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_interrupted_run_checks_what_it_has(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "run"
    async with run(folder) as process:
        await output_until(process, "kill ")  # a fault was injected
        process.send_signal(number)
        await output_until(process, "ENDED EARLY after ")
        assert await process.wait() == 1
    report = msgspec.json.decode((folder / "report.json").read_bytes())
    assert report["ended_early"] == "interrupted"
    assert report["faults"]
    [journals] = [verdict for verdict in report["verdicts"] if verdict["rule"] == "journals are linearizable"]
    assert journals["ok"]
    assert journals["checked"]


@pytest.mark.timeout(120)
async def test_no_process_outlives_a_run_whose_processes_all_get_the_signal(tmp_path: Path) -> None:
    async with run(tmp_path / "run", "--only", "kill") as process:
        await output_until(process, " faults in ")
        os.kill(max(pids_of_session(process.pid)), signal.SIGSTOP)  # only SIGKILL ends it now
        os.killpg(process.pid, signal.SIGTERM)  # also the process from which the others are forked
        await output_until(process, "ENDED EARLY after ")
        await process.wait()
        await session_ended(process.pid)


@pytest.mark.timeout(120)
async def test_an_interrupt_does_not_wait_for_the_inspector(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    async with run(folder, "--minutes", "0.01") as process:
        while not [*folder.glob("history/inspector-*")]:
            assert process.returncode is None
            await asyncio.sleep(0.02)
        os.kill(max(pids_of_session(process.pid)), signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        await output_until(process, "ENDED EARLY after ")
        await process.wait()
        await session_ended(process.pid)


def test_a_run_that_has_nothing_to_check_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def end(*_: object, **__: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(command, "run_faults", end)
    assert command.main([]) == command.INTERRUPTED
    assert [*tmp_path.iterdir()] == []


@pytest.mark.timeout(120)
async def test_servers_that_are_starting_are_stopped_by_an_interrupt(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    async with run(folder, "--servers") as process:
        while not [*folder.glob("servers/*/process.json")]:
            assert process.returncode is None
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)  # a second one does not interrupt the stop of the servers
        await output_until(process, "interrupted before the workload began")
        assert await process.wait() == 130
    assert running_in(folder) == []
    assert [*folder.glob("servers/*")] == []
