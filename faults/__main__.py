"""`./dev faults`: the workload under faults, the checker, and a report."""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from faults.mutants import run_mutants
from faults.report import facts, summarize, write_report
from faults.run import RunResult, check_run, run_faults
from faults.servers import RunServers

#: The exit code of a run that was interrupted before there was anything to check.
INTERRUPTED = 130


def main(arguments: list[str]) -> int:
    """Run, print the verdict and write the report; return 1 if a rule is violated or a process did not recover."""
    parser = argparse.ArgumentParser(prog="./dev faults", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="the time within which faults begin (default: 1)")
    parser.add_argument("--seed", type=int, help="the seed of the schedule (default: a new one)")
    parser.add_argument(
        "--only", help="one kind of fault (kill, delay, …), one process (writer-1) or one role (writer)"
    )
    parser.add_argument(
        "--servers", action="store_true", help="on one Kafka broker, one Cassandra node, PostgreSQL and Spark"
    )
    parser.add_argument(
        "--cluster", action="store_true", help="on three brokers, three nodes, a primary with a standby, and Spark"
    )
    parser.add_argument("--out", type=Path, help="a new folder for histories, logs and report")
    parser.add_argument(
        "--mutants",
        nargs="?",
        const="",
        metavar="TEXT",
        help="instead, run briefly on each mutant of Tidebook, or on those whose name contains the text",
    )
    given = parser.parse_args(arguments)
    if given.mutants is not None:
        # SIGTERM too ends the current run together with its processes.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        results = run_mutants(given.mutants or None, _say)
        return 0 if results and all(result.caught_by for result in results) else 1
    seed = random.randrange(10**6) if given.seed is None else given.seed
    folder = given.out or Path(tempfile.mkdtemp(prefix="tidebook-faults-"))
    command = f"./dev faults --minutes {given.minutes:g} --seed {seed}"
    if given.only is not None:
        command += f" --only {given.only}"
    for option in ("servers", "cluster"):
        if getattr(given, option):
            command += f" --{option}"
    try:
        result = asyncio.run(_interruptible(_run(given, folder.absolute(), seed, command)))
    except asyncio.CancelledError:
        _say("interrupted before the workload began")
        if given.out is None:
            shutil.rmtree(folder, ignore_errors=True)
        return INTERRUPTED
    history = check_run(result, folder)
    found = facts(result, history)
    for line in summarize(found):
        _say(line)
    _say(f"report: {write_report(folder, found, result, history)}")
    return 0 if result.ok else 1


async def _interruptible(run: Coroutine[Any, Any, RunResult]) -> RunResult:
    """Cancel a run at the first SIGINT or SIGTERM, so that it stops its processes and servers."""
    task = asyncio.ensure_future(run)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, _cancel_once, task)
    return await task


def _cancel_once(task: asyncio.Task[RunResult]) -> None:
    """Cancel a task; a second signal must not interrupt the stop of processes and servers."""
    if not task.cancelling():
        task.cancel()


async def _run(given: argparse.Namespace, folder: Path, seed: int, command: str) -> RunResult:
    options: dict[str, Any] = {"seconds": given.minutes * 60, "seed": seed, "only": given.only, "command": command}
    if not (given.servers or given.cluster):
        return await run_faults(folder, say=_say, **options)
    servers = RunServers(folder / "servers", cluster=given.cluster)
    try:
        await servers.start()
        _say(f"servers: {', '.join(servers.nodes)}")
        return await run_faults(folder, say=_say, servers=servers, **options)
    finally:
        await servers.close()


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
