"""`python -m bench NAME`: progress on stderr, and one JSON object as the last line of stdout."""

from __future__ import annotations

import sys
from importlib import import_module

from bench.all import BENCHES
from bench.conditions import begin


def main(arguments: list[str]) -> int:
    """Run one benchmark by name, or `all` of them."""
    if not arguments or arguments[0] not in (*BENCHES, "all"):
        asked = arguments[:1] in (["-h"], ["--help"])
        usage = f"usage: bench NAME, one of: {', '.join(BENCHES)}; or bench all. bench NAME --help shows its options"
        print(usage, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    begin(arguments)
    return import_module(f"bench.{arguments[0]}").main(arguments[1:]) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
