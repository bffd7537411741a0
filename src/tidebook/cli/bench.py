"""`tidebook bench NAME`: one benchmark; its last line of output is one JSON object with the ratios by name."""

from __future__ import annotations

from typing import Annotated

import typer

from tidebook.bench.__main__ import main
from tidebook.core.errors import InvalidInput

ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}


def bench(context: typer.Context, name: Annotated[str, typer.Argument(help="Which one, for example: journal")]) -> None:
    """Run one benchmark side by side with its reference; further arguments are the benchmark's own."""
    try:
        code = main([name, *context.args])
    except ModuleNotFoundError as error:
        raise InvalidInput(f"bench {name} needs {error.name}, which is not installed: run ./dev setup") from error
    raise typer.Exit(code)
