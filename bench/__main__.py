"""`python -m bench NAME`: progress on stderr, and one JSON object as the last line of stdout."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Run one benchmark by name."""
    names = sorted(
        path.stem
        for path in Path(__file__).parent.glob("*.py")
        if path.stem not in {"__init__", "__main__", "replication", "timing"}
    )
    if not arguments or arguments[0] not in names:
        print(f"usage: bench NAME, one of: {', '.join(names)}", file=sys.stderr)
        return 2
    import_module(f"bench.{arguments[0]}").main(arguments[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
