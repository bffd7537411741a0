"""The entry point of ./dev: parse the arguments, run a command, return its exit code."""

from __future__ import annotations

import sys

from tools import commands
from tools.environment import SetupError

USAGE = """\
usage: ./dev COMMAND

  up                       set up what is missing, then run Tidebook, everything embedded
  test [--long] [--without NAME] [PYTEST ARGUMENT...]
                           set up what is missing, start the real servers, run every test
  setup                    all extras and development tools into .venv, nothing else
  check                    format, lint, types, import contracts, unit tests: under two minutes
  bench NAME | all [NAME...] [--quick] [--report] [--add FILE]
                           one benchmark, whose last line of output is one JSON object; or all of them one after
                           another, with a report of their last results (--report: the report alone; --add: with
                           the output of one benchmark, instead of running any)
  mutate [PACKAGE...] [--sample N]
                           mutants of packages; prints the share that the tests detect
  faults [--minutes M] [--seed S] [--only NAME] [--servers | --cluster] [--mutants [TEXT]]
                           many processes under seeded faults, then an independent checker and a report
  fuzz [TARGET] [--seconds N] [--input FILE]
                           coverage-guided fuzzing of every parser of untrusted bytes, or of one
  sbom                     bills of materials of the pinned packages, CycloneDX, into dist
  audit [--service pypi|osv] [SET...]
                           known vulnerabilities of the pinned packages; exit code 5 if they could not be looked up
  servers start|stop|status [--only NAMES] [--without NAMES] [--json] [--profile test|bench]
                           real Kafka, Cassandra, PostgreSQL and MariaDB on loopback; with --cluster three brokers,
                           three nodes, a synchronous standby and Spark with two workers
  build                    wheel and source archive into dist, reproducible and checked
  docs [serve]             docs as a site into site, links checked; serve: on loopback, rebuilt on changes
"""


#: The commands that run a program which answers --help; for the others it is this text, and nothing is installed.
WITH_HELP = {"up", "bench", "mutate", "faults", "fuzz", "servers"}


def main(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    if not arguments or arguments[0] in {"help", "-h", "--help"}:
        print(USAGE, end="")
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    command = commands.COMMANDS.get(name)
    if command is None:
        print(f"dev: there is no command {name!r}\n\n{USAGE}", end="", file=sys.stderr)
        return 2
    if name not in WITH_HELP and {*rest} & {"-h", "--help"}:
        print(USAGE, end="")
        return 0
    try:
        return command(rest)
    except SetupError as error:
        print(f"dev: {error}", file=sys.stderr)
        return 5
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
