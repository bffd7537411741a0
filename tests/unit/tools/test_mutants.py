"""Tests of the mutation operators that ./dev mutate applies."""

from __future__ import annotations

import ast

import pytest

from tools.mutants.operators import mutants_of, mutated

SOURCE = '''
LIMIT = 5

def price(count: int, *, member: bool) -> int:
    """Return the price of `count` items."""
    if count < 3 and member:
        log.warning("few")
        return max(count, 1) + 2
    send(count)
    return count
'''


def test_every_operator_of_a_function_gives_a_mutant() -> None:
    changes = [mutant.change for mutant in mutants_of("price.py", SOURCE)]
    assert changes == [
        "condition negated",
        "and -> or",
        "Lt -> LtE",
        "3 -> 4",
        "returns None",
        "Add -> Sub",
        "max -> min",
        "1 -> 2",
        "2 -> 3",
        "statement removed",
        "returns None",
    ]


@pytest.mark.parametrize("index", range(11))
def test_each_mutant_is_another_program(index: int) -> None:
    assert ast.dump(mutated(SOURCE, index)) != ast.dump(ast.parse(SOURCE))


def test_an_index_past_the_last_mutation_is_refused() -> None:
    with pytest.raises(IndexError):
        mutated(SOURCE, 11)
