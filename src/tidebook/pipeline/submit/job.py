"""The script for `spark-submit`: `spark-submit … job.py pipeline replicate --book tidebook.toml`."""

from __future__ import annotations

from importlib import import_module


def main() -> None:
    """Run the command line; import it by name, because this package must not depend on `tidebook.cli`."""
    import_module("tidebook.cli.app").main()


if __name__ == "__main__":
    main()
