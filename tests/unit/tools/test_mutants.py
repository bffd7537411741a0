"""Tests of the mutation operators that ./dev mutate applies, and of what counts as a killed mutant."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.mutants.__main__ import ROOT, CoverageData, RunTests, Verdict, exit_code, judge, report, run_tests, sample
from tools.mutants.operators import Mutant, mutants_of, mutated

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


def test_each_operator_of_a_chained_comparison_gives_a_mutant() -> None:
    chained = "def inside(a: int) -> bool:\n    return low <= a < high\n"
    assert [mutant.change for mutant in mutants_of("m.py", chained)] == ["returns None", "LtE -> Lt", "Lt -> LtE"]
    assert [ast.unparse(mutated(chained, index)).splitlines()[1].strip() for index in (1, 2)] == [
        "return low < a < high",
        "return low <= a <= high",
    ]


def ended(*codes: int | None) -> RunTests:
    """Runs that end with these exit codes, one after the other; None does not end in time."""
    left = list(codes)
    return lambda limit_s: left.pop(0)


@pytest.mark.parametrize(
    ("mutant", "control", "verdict"),
    [
        ([0], [], Verdict.SURVIVED),
        ([1], [], Verdict.KILLED),
        ([2], [], Verdict.ERROR),
        ([3], [], Verdict.ERROR),
        ([4], [], Verdict.ERROR),
        ([5], [], Verdict.ERROR),
        ([-9], [], Verdict.ERROR),
        ([None, None], [0], Verdict.KILLED),
        ([None, 0], [0], Verdict.SURVIVED),
        ([None, 1], [0], Verdict.KILLED),
        ([None, 4], [0], Verdict.ERROR),
        ([None], [1], Verdict.ERROR),
    ],
)
def test_only_failed_tests_and_a_time_limit_after_a_control_run_kill_a_mutant(
    mutant: list[int | None], control: list[int | None], verdict: Verdict
) -> None:
    assert judge(ended(*mutant), ended(*control), 0.1) is verdict


def test_the_time_limit_follows_the_control_run() -> None:
    limits: list[float | None] = []

    def never(limit_s: float | None) -> None:
        limits.append(limit_s)

    judge(never, ended(0), 100.0)
    assert limits[0] == 430.0  # the start, and four times what the tests take without the mutant
    assert limits[1] is not None
    assert limits[1] < 40.0  # the control run took no time


def mutants(path: str, count: int) -> list[Mutant]:
    return [Mutant(path, line, line, "x") for line in range(count)]


def test_the_share_must_be_reached_in_each_package() -> None:
    first, second = mutants("a.py", 10), mutants("b.py", 10)
    verdicts = dict.fromkeys([*first, *second], Verdict.KILLED)
    verdicts[second[0]], verdicts[second[1]] = Verdict.SURVIVED, Verdict.UNCOVERED
    reports = {"a": report(first, verdicts, 10), "b": report(second, verdicts, 40)}
    assert reports["b"] == {
        "mutants": 10, "of": 40, "killed": 8, "survived": 1, "not_run": 1, "error": 0, "share": 0.8,
    }  # fmt: skip
    assert exit_code(reports, 0.9) == 1  # though 18 of 20 were killed
    assert exit_code(reports, 0.8) == 0


def test_a_mutant_that_could_not_be_judged_is_no_success() -> None:
    chosen = mutants("a.py", 100)
    verdicts = {mutant: Verdict.ERROR if mutant.line == 0 else Verdict.KILLED for mutant in chosen}
    found = report(chosen, verdicts, 100)
    assert found["share"] == 0.99
    assert exit_code({"a": found}, 0.9) == 2


def test_a_sample_has_so_many_mutants_of_each_package_and_repeats_with_its_seed() -> None:
    every = mutants("a.py", 50)
    chosen = sample(every, 20, seed=7)
    assert len(set(chosen)) == 20
    assert chosen == sample(every, 20, seed=7) != sample(every, 20, seed=8)
    assert sample(every, 0, seed=7) == sample(every, 60, seed=7) == every


def test_tests_that_fail_without_a_mutant_are_not_run() -> None:
    [mutant] = mutants("src/a.py", 1)
    lines = {str(ROOT / mutant.path): {"0": ["slow", "broken", "quick"]}}
    covered = CoverageData(lines, {"slow": 2.0, "quick": 0.1, "broken": 0.0}, failed=frozenset({"broken"}))
    assert covered.tests_of(mutant) == ["quick", "slow"]


def test_the_quickest_tests_run_within_the_time_that_a_mutant_may_take() -> None:
    [mutant] = mutants("src/a.py", 1)
    lines = {str(ROOT / mutant.path): {"0": ["slow", "quick", "quicker"]}}
    covered = CoverageData(lines, {"slow": 3.0, "quick": 0.2, "quicker": 0.1}, seconds_max=3.2)
    assert covered.tests_of(mutant) == ["quicker", "quick"]


def test_a_run_reports_the_exit_code_of_pytest_and_ends_what_takes_too_long(tmp_path: Path) -> None:
    fails, sleeps = tmp_path / "test_fails.py", tmp_path / "test_sleeps.py"
    fails.write_text("def test_it():\n    assert False\n")
    sleeps.write_text("import time\ndef test_it():\n    time.sleep(600)\n")
    assert run_tests(None, [str(fails)], limit_s=None) == 1
    assert run_tests(None, [f"{fails}::test_other"], limit_s=None) == 4
    assert run_tests(None, [str(sleeps)], limit_s=3) is None


def test_a_test_module_that_a_mutant_keeps_from_loading_is_a_failure(tmp_path: Path) -> None:
    module = tmp_path / "test_loads.py"
    path, change = "src/tidebook/core/seq_nr.py", "returns None"
    module.write_text("from tidebook.core.seq_nr import seq_nr\nassert seq_nr(1) == 1\ndef test_it():\n    pass\n")
    index = next(each.index for each in mutants_of(path, (ROOT / path).read_text()) if each.change == change)
    tests = [f"{module}::test_it"]
    assert run_tests(None, tests, limit_s=None) == 0
    assert run_tests(Mutant(path, 1, index, change), tests, limit_s=None) == 1
