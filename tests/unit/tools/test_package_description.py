"""The description of the package: README without links that a package index cannot follow."""

from __future__ import annotations

from hatch_build import without_relative_links

TEXT = "[a](docs/a.md) ![p](docs/p.svg) [b](https://host/b) [c](#c)"


def test_without_an_address_relative_links_are_plain_text() -> None:
    assert without_relative_links(TEXT, None) == "a *p* [b](https://host/b) [c](#c)"


def test_with_an_address_they_are_absolute() -> None:
    assert without_relative_links(TEXT, "https://host/r") == (
        "[a](https://host/r/blob/main/docs/a.md) ![p](https://host/r/raw/main/docs/p.svg) [b](https://host/b) [c](#c)"
    )
