"""What `spark-submit` runs: `spark-submit … job.py pipeline replicate --book tidebook.toml`."""

from __future__ import annotations

from importlib import import_module


def main() -> None:
    """Run the command line; named as text, for it stands above this package."""
    import_module("tidebook.cli.app").main()


if __name__ == "__main__":
    main()
