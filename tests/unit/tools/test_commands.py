"""How ./dev reads its arguments."""

from __future__ import annotations

import pytest

from tools.__main__ import main
from tools.commands import COMMANDS, SERVER_NAMES, _take_without, bench_servers


@pytest.mark.parametrize(
    ("given", "without", "rest"),
    [
        (["tests/unit", "-q"], [], ["tests/unit", "-q"]),
        (["--without", "kafka", "-x"], ["kafka"], ["-x"]),
        (["--without=kafka,mariadb", "--long"], ["kafka", "mariadb"], ["--long"]),
        (["--without", "all"], list(SERVER_NAMES), []),
    ],
)
def test_servers_to_leave_out_are_taken_from_the_arguments(
    given: list[str], without: list[str], rest: list[str]
) -> None:
    assert _take_without(given) == (without, rest)


def test_a_server_that_does_not_exist_cannot_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", "--without", "oracle"]) == 2
    assert "oracle" in capsys.readouterr().err


def test_an_unknown_command_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dance"]) == 2
    assert "dance" in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    told = capsys.readouterr().out
    assert [name for name in COMMANDS if f"\n  {name} " not in told] == []


@pytest.mark.parametrize(
    ("given", "servers"),
    [
        (["kafka", "--quick"], ["kafka", "cassandra"]),
        (["queue"], ["postgres"]),
        (["kafka", "--book", "mine.toml"], []),
        (["cassandra", "--address=127.0.0.1:9042"], []),
        (["outbox", "--help"], []),
        (["journal"], []),
        ([], []),
    ],
)
def test_a_benchmark_gets_the_servers_that_it_needs_and_nobody_named(
    given: list[str], servers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIDEBOOK_SERVERS", raising=False)
    assert bench_servers(given) == servers
