"""The domain layer over an embedded book with fsync: each part is a module of `bench/domain_parts`."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from bench.domain_parts import follow
from bench.timing import report

#: A part has `run(folder, quick=…)`, which returns its figures, and `TARGETS` for some of them.
PARTS: Mapping[str, ModuleType] = {"follow": follow}


def main(argv: list[str]) -> None:
    """Run all parts, or some, and print the figures."""
    parser = argparse.ArgumentParser(prog="bench domain", description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--quick", action="store_true", help="a fraction of the work")
    options = parser.parse_args(argv)
    figures: dict[str, float] = {}
    targets: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.part or PARTS:
            figures |= PARTS[name].run(Path(folder), quick=options.quick)
            targets |= PARTS[name].TARGETS
    report("domain", {name: figures[name] for name in targets}, figures, targets)
