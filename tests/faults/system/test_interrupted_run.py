"""A run that is interrupted stops its processes and servers, and checks what it has."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

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
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield started
    finally:
        if started.returncode is None:
            started.kill()


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
async def test_servers_that_are_starting_are_stopped_by_an_interrupt(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    async with run(folder, "--servers") as process:
        while not [*folder.glob("servers/*/process.json")]:
            assert process.returncode is None
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)  # a second one does not interrupt the stop of the servers
        await output_until(process, "interrupted before the workload has begun")
        assert await process.wait() == 130
    assert running_in(folder) == []
    assert [*folder.glob("servers/*")] == []
