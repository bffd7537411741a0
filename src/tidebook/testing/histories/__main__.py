"""Check recorded histories: `python -m tidebook.testing.histories FILE...`; exit with 1 if a rule is violated."""

from __future__ import annotations

import sys
from pathlib import Path

from tidebook.testing.histories.checker import check_files


def main(arguments: list[str]) -> int:
    """Print the verdict of each rule and its violations; return the exit code."""
    if not arguments:
        print("usage: python -m tidebook.testing.histories FILE...", file=sys.stderr)
        return 2
    verdicts = check_files(map(Path, arguments))
    for verdict in verdicts:
        found = "holds" if verdict.ok else f"VIOLATED {len(verdict.violations)} times"
        print(f"{verdict.rule}: {found}, {verdict.checked:,} checked")
        for violation in verdict.violations:
            print(f"  {violation.subject}: {violation.message}")
    return 0 if all(verdict.ok for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
