"""`tidebook bench NAME`: run one benchmark of a source checkout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tidebook.core.errors import InvalidInput, NotFound

ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}
#: The root of the checkout that this package was imported from; an installed wheel has no benchmarks there.
CHECKOUT = Path(__file__).resolve().parents[3]


def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The benchmark, for example: journal")],
) -> None:
    """Run one benchmark and compare it with its reference.

    Further arguments go to the benchmark. Its last line of output is a JSON object with the ratios by name.
    """
    if not (CHECKOUT / "bench" / "__main__.py").exists():
        raise NotFound("benchmarks are not in the installed package: run ./dev bench NAME in a source checkout")
    sys.path.insert(0, str(CHECKOUT))
    from bench.__main__ import main

    try:
        code = main([name, *context.args])
    except ModuleNotFoundError as error:
        raise InvalidInput(f"bench {name} needs {error.name}, which is not installed: run ./dev setup") from error
    raise typer.Exit(code)
