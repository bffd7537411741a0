"""Named priorities are the same in Python and on the command line."""

from __future__ import annotations

import pytest

from tidebook.cli.queue import parse_priority
from tidebook.core.errors import InvalidInput
from tidebook.queue import priority


def test_every_named_priority_has_its_name_on_the_command_line() -> None:
    named = {name.lower(): value for name, value in vars(priority).items() if type(value) is int}
    assert {name: parse_priority(name) for name in named} == named


@pytest.mark.parametrize("text", ["²", "9" * 5_000, "-1", "256", "urgent", "", "1.0"])
def test_an_unknown_priority_is_bad_input(text: str) -> None:
    with pytest.raises(InvalidInput, match="--priority must be 0 to 255"):
        parse_priority(text)
