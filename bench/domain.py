"""The domain layer over an embedded book with fsync: each part is a module of `bench/domain_parts`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from bench.domain_parts import catch_up, entities, follow, live
from bench.servers import database, running
from bench.timing import report

#: Ratios by name, and the figures from which they were computed.
Measured = tuple[dict[str, float], dict[str, Any]]


def _catch_up(quick: bool) -> Measured:
    with database(running()["postgres"]["url"], "domain") as url:
        where = url.replace("postgresql://", "postgresql+psycopg://", 1)
        return catch_up.measure(where, catch_up.EVENTS // 10 if quick else catch_up.EVENTS)


PARTS: dict[str, Callable[[bool], Measured]] = {
    "follow": follow.measure,
    "entities": lambda quick: entities.measure(),
    "live": live.measure,
    "catch-up": _catch_up,
    "live-servers": live.measure_servers,
}
TARGETS = {**follow.TARGETS, **entities.TARGETS, **live.TARGETS, **catch_up.TARGETS, **live.SERVER_TARGETS}


def main(argv: list[str]) -> None:
    """Run all parts, or some, and print the figures."""
    parser = argparse.ArgumentParser(prog="bench domain", description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--quick", action="store_true", help="a fraction of the work")
    options = parser.parse_args(argv)
    ratios: dict[str, float] = {}
    figures: dict[str, Any] = {}
    for name in options.part or PARTS:
        found, made_from = PARTS[name](options.quick)
        ratios |= found
        figures |= made_from
    report("domain", ratios, figures, {name: target for name, target in TARGETS.items() if name in ratios})
