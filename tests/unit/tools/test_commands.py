"""The commands of ./dev and their arguments."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main as bench
from bench.all import BENCHES
from tests.conftest import server_entry
from tidebook.cli.doctor import EXTRAS
from tidebook.testing.servers.process import birth_of
from tools import chromium, commands
from tools.__main__ import WITH_HELP, main
from tools.commands import BENCH_SERVERS, COMMANDS, SERVER_NAMES, _take_without, bench_servers
from tools.environment import ROOT


@pytest.mark.parametrize(
    ("given", "without", "rest"),
    [
        (["tests/unit", "-q"], [], ["tests/unit", "-q"]),
        (["--without", "kafka", "-x"], ["kafka"], ["-x"]),
        (["--without=kafka,mariadb", "--long"], ["kafka", "mariadb"], ["--long"]),
        (["--without", "all"], list(SERVER_NAMES), []),
    ],
)
def test_servers_to_exclude_are_taken_from_the_arguments(given: list[str], without: list[str], rest: list[str]) -> None:
    assert _take_without(given) == (without, rest)


def test_an_unknown_server_cannot_be_excluded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", "--without", "oracle"]) == 2
    assert "oracle" in capsys.readouterr().err


def test_a_server_that_does_not_start_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def nothing_starts(command: str, names: list[str], home: Path, *options: str, quiet: bool = False) -> int:
        asked.append(command)
        home.mkdir(exist_ok=True)
        return 1

    monkeypatch.setattr(commands, "HOME", tmp_path)
    monkeypatch.setattr(commands, "_run_servers", nothing_starts)
    monkeypatch.setattr(commands, "_install_with_java", lambda: None)
    monkeypatch.setattr(chromium, "ensure", lambda: "chromium")
    monkeypatch.setattr(commands, "_python", lambda *arguments, **options: pytest.fail("the tests were run"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(["test", "--without", "mariadb"]) == 5
    assert "a server did not start" in capsys.readouterr().err
    assert asked == ["status", "start", "stop"]
    assert not list(tmp_path.iterdir())  # the servers that had started were removed


@pytest.mark.parametrize(("free_bytes_min", "parent"), [(0, "memory"), (2**60, "home")], ids=["room", "no room"])
def test_the_files_of_a_test_run_are_in_memory_if_it_has_room_and_are_removed(
    free_bytes_min: int, parent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(commands, "MEMORY", tmp_path / "memory")
    monkeypatch.setattr(commands, "HOME", tmp_path / "home")
    monkeypatch.setattr(commands, "MEMORY_BYTES_MIN", free_bytes_min)
    with commands.test_folder() as folder:
        assert folder.parent == tmp_path / parent
        (folder / "file").touch()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "failed", "runs"),
    [([], ["a.py::b"], [["-n", "0", "a.py::b"]]), (["tests/unit"], ["a.py::b"], []), ([], [*"abcdef"], [])],
)
def test_a_few_failures_of_a_full_run_are_retried_alone_and_decide_its_result(
    arguments: list[str], failed: list[str], runs: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def run_python(*words: str, **options: object) -> int:
        if "pytest" not in words:
            return 0
        calls.append([*words[2:]])
        file = tmp_path / ".pytest_cache" / "v" / "cache" / "lastfailed"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(dict.fromkeys(failed, True)))
        return 1 if len(calls) == 1 else 0

    monkeypatch.setattr(commands, "ROOT", tmp_path)
    monkeypatch.setattr(commands, "_python", run_python)
    monkeypatch.setattr(commands, "_install_with_java", lambda: None)
    monkeypatch.setattr(commands, "server_home", lambda names, **_: contextlib.nullcontext(tmp_path))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert commands.test(arguments) == (0 if runs else 1)
    assert calls[1:] == runs


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (None, "kafka is not running"),
        ({}, "kafka is not among the servers that run"),
        ({"kafka": {"address": "127.0.0.1:1"}}, "kafka does not answer"),
    ],
    ids=["no servers", "others", "dead"],
)
def test_a_test_whose_server_does_not_run_fails_and_is_not_skipped(
    status: dict[str, Any] | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if status is not None:
        (tmp_path / "status.json").write_text(json.dumps({"servers": status}))
    monkeypatch.setenv("TIDEBOOK_SERVERS", str(tmp_path / "status.json"))
    monkeypatch.setenv("TIDEBOOK_WITHOUT", "cassandra")
    with pytest.raises(pytest.fail.Exception, match=message):
        server_entry("kafka")


def test_an_unknown_command_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dance"]) == 2
    assert "dance" in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    message = capsys.readouterr().out
    assert re.findall(r"^  (\w+) ", message, re.M) == [*COMMANDS]


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("name", sorted({*COMMANDS} - {*WITH_HELP}))
def test_help_of_a_command_runs_nothing(
    name: str, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(COMMANDS, name, lambda arguments: pytest.fail(f"{name} was run"))
    assert main([name, option]) == 0
    assert capsys.readouterr().out.startswith("usage: ./dev")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_installs_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a fresh clone, the question would otherwise download hundreds of megabytes."""
    monkeypatch.setattr("tools.environment.has", lambda requirements: False)
    monkeypatch.setitem(COMMANDS, name, lambda arguments: pytest.fail(f"{name} was run"))
    assert main([name, "--help"]) == 0
    usage = capsys.readouterr().out
    assert usage.startswith(f"usage: ./dev {name}")
    assert not [other for other in COMMANDS if f"\n  {other} " in usage]


@pytest.mark.parametrize("redirect", [">/dev/full", "| true", ">&-"])
def test_a_standard_output_that_cannot_be_written_is_no_traceback(redirect: str) -> None:
    for _ in range(5):  # whether the reader of the pipe has ended is a race
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", f"./dev help {redirect}"], cwd=ROOT, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (5 if "full" in redirect else 0, "")


def test_help_of_the_benchmarks_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["--help"]) == 0
    usage = capsys.readouterr().out
    assert [name for name in BENCHES if name not in usage] == []


@pytest.mark.parametrize("name", ["publish"])
def test_a_command_that_is_not_implemented_is_not_offered(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert f"there is no command {name!r}" in capsys.readouterr().err


def test_the_extras_are_those_that_the_doctor_checks() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras.pop("all") == [f"tidebook[{','.join(extras)}]"]
    assert sorted(extras) == sorted(EXTRAS)


#: The address of a server that a benchmark reads.
ADDRESS = re.compile(r'\["(kafka|cassandra|postgres|mariadb)"\]\["')


@pytest.mark.parametrize("name", BENCHES)
def test_the_servers_of_a_benchmark_are_started_for_it(name: str) -> None:
    source = [ROOT / "bench" / f"{name}.py", *(ROOT / "bench" / f"{name}_parts").glob("*.py")]
    used = {server for file in source for server in ADDRESS.findall(file.read_text())}
    # wal starts its own broker unless one is running, and console needs servers only with --servers.
    assert used <= {*BENCH_SERVERS.get(name, ())} or name in {"wal", "console"}
    assert {*BENCH_SERVERS.get(name, ())} <= {*BENCH_SERVERS["all"]}


@pytest.mark.parametrize(
    ("given", "servers"),
    [
        (["kafka", "--quick"], ["kafka", "cassandra"]),
        (["queue"], ["postgres"]),
        (["kafka", "--book", "mine.toml"], []),
        (["cassandra", "--address=127.0.0.1:9042"], []),
        (["outbox", "--help"], []),
        (["journal"], []),
        (["tags", "--only", "catch-up"], []),
        (["tags", "--store=both"], ["cassandra"]),
        (["tags", "--store", "cassandra"], ["cassandra"]),
        (["all"], ["kafka", "cassandra", "postgres"]),
        (["all", "--report"], []),
        (["all", "--add", "result.json"], []),
        ([], []),
    ],
)
def test_a_benchmark_gets_the_servers_that_it_needs_unless_they_are_named(
    given: list[str], servers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIDEBOOK_SERVERS", raising=False)
    assert bench_servers(given) == servers


#: `./dev faults` with another program for the workload: it says which signal it got, and leaves a process behind.
INTERRUPTED = """
import sys
from tools import __main__, commands
commands.environment.ensure = lambda name: None
run = commands.subprocess.Popen
commands.subprocess.Popen = lambda command, **options: run([sys.executable, "-c", sys.argv[1]], **options)
sys.exit(__main__.main(["faults"]))
"""
CHILD = """
import signal, subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
def end(number, frame):
    print("ends after", signal.Signals(number).name, flush=True)
    sys.stdin.readline()
    sys.exit(0)
signal.signal(signal.SIGINT, end)
print(left.pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_ends_all_processes_of_a_run_and_later_ones_do_not_interrupt_its_end(
    number: signal.Signals,
) -> None:
    with subprocess.Popen(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", INTERRUPTED, CHILD],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        left = int(process.stdout.readline())
        os.killpg(process.pid, number)
        assert process.stdout.readline() == "ends after SIGINT\n"
        os.killpg(process.pid, number)
        process.stdin.write("\n")
        process.stdin.close()
        assert process.stdout.read() == ""
        assert process.wait(10) == 128 + number
    assert birth_of(left) is None
