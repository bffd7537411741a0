"""The entry point of ./dev: parse the arguments, run a command, return its exit code."""

from __future__ import annotations

import os
import re
import sys

from tools import commands, environment
from tools.environment import SetupError

USAGE = """\
usage: ./dev COMMAND

  up                       install missing packages, then run Tidebook with everything embedded
  test [--long] [--without NAME] [PYTEST ARGUMENT...]
                           install missing packages, start the real servers, run every test
  setup                    install all extras and development tools into .venv, and do nothing else
  check                    format, lint, types, import contracts, unit tests: under two minutes
  bench NAME | all [NAME...] [--quick] [--report] [--add FILE]
                           one benchmark, whose last line of output is one JSON object; or all of them one after
                           another, with a report of their last results (--report: the report alone; --add: with
                           the output of one benchmark, instead of running any)
  mutate [PACKAGE...] [--sample N]
                           mutants of packages; prints the share that the tests detect
  faults [--minutes M] [--seed S] [--only NAME] [--servers | --cluster] [--out FOLDER] [--mutants [TEXT]]
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


#: The commands whose program has a --help of its own, and the packages that it needs. For other commands, and while
#: these packages are missing, --help prints the command's part of USAGE, because asking for help must install nothing.
WITH_HELP = {"up": "base", "bench": "dev", "mutate": "dev", "faults": "dev", "fuzz": "dev", "servers": "dev"}


def usage_of(name: str) -> str:
    """Return the usage of one command."""
    found = re.search(rf"^  {name}\b.*\n(?:   .*\n)*", USAGE, re.M)
    return f"usage: ./dev {found[0].lstrip() if found else name}"


def main(arguments: list[str]) -> int:
    """Run one command and return its exit code; print no traceback if standard output is closed or full."""
    try:
        code = run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:
            raise
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())  # the interpreter flushes it once more
        return 0 if isinstance(error, BrokenPipeError) else 5
    return code


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    if not arguments or arguments[0] in {"help", "-h", "--help"}:
        print(USAGE, end="")
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    command = commands.COMMANDS.get(name)
    if command is None:
        print(f"dev: there is no command {name!r}\n\n{USAGE}", end="", file=sys.stderr)
        return 2
    if {*rest} & {"-h", "--help"} and not (name in WITH_HELP and environment.has(WITH_HELP[name])):
        print(usage_of(name), end="")
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
