"""Help texts of commands as plain text, with arguments named as a user types them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

_BOUNDS = re.compile(r"<=\d{10,}")


class HelpfulCommand(TyperCommand):
    """A command whose help shows `TOPIC` instead of typer's `{TOPIC}` and `TOPIC <str>`."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line, with only optional parts in brackets."""
        pieces = [re.sub(r"^\{(.*)\}", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]
        return [piece.removesuffix("...") if " " in piece else piece for piece in pieces]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options without types and without huge upper bounds."""
        rows: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for each in self.get_params(ctx):
            record = each.get_help_record(ctx)
            if record is None:
                continue
            name, text = record
            if each.param_type_name == "argument":
                name, text = getattr(each, "metavar", None) or name, text.replace("[required]", "").rstrip()
            rows[each.param_type_name].append((name, _BOUNDS.sub("", text)))
        for title, found in (("Arguments", rows["argument"]), ("Options", rows["option"])):
            if found:
                with formatter.section(title):
                    formatter.write_dl(found)


class Group(typer.Typer):
    """A group of `HelpfulCommand` commands."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        """Register a command, as `typer.Typer.command` does."""
        return super().command(name, **{"cls": HelpfulCommand, **options})
