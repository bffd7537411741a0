"""Start, stop and show the real servers: python -m tidebook.testing.servers start|stop|status."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from tidebook.testing.servers.errors import ServerError
from tidebook.testing.servers.group import CLUSTER_NAMES, NAMES, ServerGroup

DONE, DIFFERENT, USAGE, UNAVAILABLE, INTERRUPTED = 0, 1, 2, 5, 130


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    known = CLUSTER_NAMES if options.cluster else NAMES
    names = [name for name in (known if options.only is None else options.only) if name not in options.without]
    if unknown := set(names) - set(known):
        print(
            f"servers: there is no {'cluster' if options.cluster else 'server'} {', '.join(unknown)}", file=sys.stderr
        )
        return USAGE
    # Exit by an exception, so that servers that are starting are stopped too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    group = ServerGroup(options.home, profile=options.profile, cluster=options.cluster, report=_report)
    try:
        if options.command == "start":
            group.start(names)
        elif options.command == "stop":
            _report(
                f"stopped {', '.join(group.stop(names, remove=options.remove)) or 'nothing: no server was running'}"
            )
    except ServerError as error:
        print(f"servers: {error}", file=sys.stderr)
        return UNAVAILABLE
    except KeyboardInterrupt:
        return INTERRUPTED
    return _show(group, names, options.command, as_json=options.json)


def _show(group: ServerGroup, names: list[str], command: str, *, as_json: bool) -> int:
    status = group.status()
    if as_json:
        print(json.dumps(status))
    elif command != "stop":
        for name in names:
            server = status["servers"].get(name)
            print(f"{name:10} {server['url']}  process {server['pid']}" if server else f"{name:10} is not running")
        if status["servers"]:
            print(f"{'book':10} {status['book']}")
    missing = command == "status" and any(name not in status["servers"] for name in names)
    return DIFFERENT if missing else DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="servers", description="Real servers on loopback, without containers.")
    parser.add_argument("command", choices=["start", "stop", "status"])
    parser.add_argument("--only", type=_names, default=None, metavar="NAMES", help=f"only these of {','.join(NAMES)}")
    parser.add_argument("--without", type=_names, default=[], metavar="NAMES", help="all except these")
    parser.add_argument("--home", type=Path, default=Path(".servers"), help="the folder of data and status")
    parser.add_argument("--profile", choices=["test", "bench"], default="test", help="fast to start, or fast at work")
    parser.add_argument(
        "--cluster",
        action="store_true",
        help="three brokers, three Cassandra nodes, a synchronous standby, and Spark with two workers, in HOME/cluster",
    )
    parser.add_argument("--remove", action="store_true", help="with stop: delete the data too")
    parser.add_argument("--json", action="store_true", help="print the status as one JSON object")
    return parser


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := set(names) - {*NAMES, *CLUSTER_NAMES}:
        raise argparse.ArgumentTypeError(f"there is no server {', '.join(sorted(unknown))}")
    return names


def _report(text: str) -> None:
    print(f"servers: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
