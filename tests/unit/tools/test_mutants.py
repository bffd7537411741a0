"""The mutation operators that ./dev mutate applies, and what counts as a killed mutant."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools.mutants.__main__ import (
    PYTEST_OPTIONS,
    CoverageData,
    Equivalent,
    RunTests,
    Verdict,
    equivalents,
    exit_code,
    judge,
    parts_of,
    report,
    sample,
    without_equivalents,
)
from tools.mutants.coverage_map import IMPORT
from tools.mutants.fork_server import ROOT, ForkServer, Outcome
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
def test_each_mutant_is_a_different_program(index: int) -> None:
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


def test_a_yield_to_other_tasks_gives_no_mutant_and_a_pause_does() -> None:
    source = "async def wait() -> None:\n    await asyncio.sleep(0)\n    await asyncio.sleep(1)\n"
    assert [(mutant.line, mutant.change) for mutant in mutants_of("wait.py", source)] == [
        (3, "statement removed"),
        (3, "1 -> 2"),
    ]


def test_texts_and_unreachable_calls_give_no_mutant() -> None:
    source = '''
class Price:
    def __repr__(self) -> str:
        return "x" if self.count > 1 else "y"

def name(kind: Kind) -> str:
    """Return 1 + 1."""
    match kind:
        case _:
            assert_never(kind)
'''
    assert mutants_of("price.py", source) == []


PASSED, FAILED, LATE = Outcome([0.1]), Outcome([0.1], failed="a"), Outcome(late="a")


def ended(*outcomes: Outcome) -> RunTests:
    """Return runs that end as given, one after the other."""
    left = list(outcomes)
    return lambda tests, limits_s: left.pop(0)


@pytest.mark.parametrize(
    ("mutant", "control", "verdict"),
    [
        ([PASSED], [], Verdict.SURVIVED),
        ([FAILED], [PASSED], Verdict.KILLED),
        ([FAILED], [FAILED], Verdict.SURVIVED),  # a test that also fails without a mutant decides nothing
        ([Outcome(broken=True)], [], Verdict.ERROR),
        ([Outcome(unfit=True)], [], None),
        ([LATE, LATE], [PASSED], Verdict.KILLED),
        ([LATE, PASSED], [PASSED], Verdict.SURVIVED),
        ([LATE, FAILED], [PASSED, PASSED], Verdict.KILLED),
        ([LATE], [FAILED], Verdict.ERROR),
    ],
)
def test_only_failed_tests_and_a_time_limit_after_a_control_run_kill_a_mutant(
    mutant: list[Outcome], control: list[Outcome], verdict: Verdict | None
) -> None:
    assert judge(ended(*mutant), ended(*control), ["a"], {}, {}) is verdict


def test_the_time_limit_follows_the_control_run_and_the_tests_before_it_are_not_repeated() -> None:
    runs: list[tuple[list[str], list[float]]] = []

    def late(tests: Sequence[str], limits_s: Sequence[float] | None) -> Outcome:
        assert limits_s is not None
        runs.append((list(tests), list(limits_s)))
        return Outcome([0.1] * tests.index("b"), late="b")

    assert judge(late, ended(Outcome([2.0])), ["a", "b", "c"], {"a": 1.0, "b": 100.0}, {}) is Verdict.KILLED
    assert runs == [(["a", "b", "c"], [9.0, 405.0, 5.0]), (["b", "c"], [13.0, 5.0])]


def test_the_tests_after_one_that_fails_without_a_mutant_still_count() -> None:
    runs: list[list[str]] = []

    def mutant(tests: Sequence[str], limits_s: Sequence[float] | None) -> Outcome:
        runs.append(list(tests))
        return Outcome([0.1], failed=tests[0])

    controls: dict[str, bool] = {}
    control = ended(Outcome([0.1], failed="a"), Outcome([0.1]))
    assert judge(mutant, control, ["a", "b"], {}, controls) is Verdict.KILLED
    assert runs == [["a", "b"], ["b"]]
    assert controls == {"a": False, "b": True}  # for all later mutants


def mutants(path: str, count: int) -> list[Mutant]:
    return [Mutant(path, line, line, "x") for line in range(count)]


def test_the_share_must_be_reached_in_each_package() -> None:
    first, second = mutants("a.py", 10), mutants("b.py", 10)
    verdicts = dict.fromkeys([*first, *second], Verdict.KILLED)
    verdicts[second[0]], verdicts[second[1]] = Verdict.SURVIVED, Verdict.UNCOVERED
    reports = {"a": report(first, verdicts, 10), "b": report(second, verdicts, 40)}
    assert reports["b"] == {
        "mutants": 10, "of": 40, "killed": 8, "survived": 1, "not_run": 1, "equivalent": 0, "error": 0,
        "share": 0.8, "share_of_all": 0.8,
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


def test_the_quickest_tests_run_within_the_time_that_a_mutant_may_take() -> None:
    [mutant] = mutants("src/a.py", 1)
    lines = {mutant.path: {"0": ["slow", "quick", "quicker"]}}
    covered = CoverageData(lines, {"slow": 3.0, "quick": 0.2, "quicker": 0.1}, seconds_max=3.2)
    assert covered.tests_of(mutant) == ["quicker", "quick"]


def test_the_quickest_test_of_each_module_comes_first() -> None:
    [mutant] = mutants("src/a.py", 1)
    seconds = {"x::1": 0.1, "x::2": 0.2, "y::1": 0.3, "y::2": 0.4, "z::1": 0.5}
    covered = CoverageData({mutant.path: {"0": sorted(seconds, reverse=True)}}, seconds)
    assert covered.tests_of(mutant) == ["x::1", "y::1", "z::1", "x::2", "y::2"]


def test_quick_tests_of_the_mutants_own_module_come_before_those_of_its_package_and_of_others() -> None:
    [mutant] = mutants("src/tidebook/core/fold.py", 1)
    own = ["tests/unit/core/test_fold.py::quick", "tests/unit/core/test_fold.py::slow"]
    package, other = "tests/unit/core/test_head.py::quick", "tests/model/test_fold.py::quickest"
    seconds = dict(zip([*own, package, other], [0.3, 5.0, 0.2, 0.1], strict=True))
    covered = CoverageData({mutant.path: {"0": list(seconds)}}, seconds)
    assert covered.tests_of(mutant) == [own[0], package, other, own[1]]


def test_a_line_that_runs_outside_tests_is_mutated_at_its_import() -> None:
    first, second = mutants("src/a.py", 2)
    covered = CoverageData({"src/a.py": {"0": ["quick", IMPORT], "1": ["quick"]}}, {})
    assert [covered.is_imported(each) for each in (first, second)] == [True, False]
    assert covered.tests_of(first) == ["quick"]


def test_each_module_of_tests_has_its_part_of_a_map() -> None:
    path = str(ROOT / "src" / "a.py")
    measured = {"seconds": {"t/x.py::one": 1.0, "t/y.py::two": 2.0}, "lines": {path: {"7": ["t/x.py::one", IMPORT]}}}
    assert parts_of(measured, ["t/x.py", "t/y.py"]) == {
        "t/x.py": {"seconds": {"t/x.py::one": 1.0}, "lines": {"src/a.py": {"7": ["t/x.py::one", IMPORT]}}},
        "t/y.py": {"seconds": {"t/y.py::two": 2.0}, "lines": {"src/a.py": {"7": [IMPORT]}}},
    }


def test_listed_equivalents_do_not_count_unless_a_test_kills_them() -> None:
    chosen = [Mutant("src/a.py", line, line, "Lt -> LtE", "if a < b:") for line in range(2)]
    chosen.append(Mutant("src/a.py", 2, 2, "Lt -> LtE", "if a < c:"))
    verdicts = dict.fromkeys(chosen, Verdict.SURVIVED) | {chosen[0]: Verdict.KILLED}
    listed = {Equivalent("src/a.py", "if a < b:", "Lt -> LtE")}
    found = without_equivalents(verdicts, listed)
    assert [found[each] for each in chosen] == [Verdict.KILLED, Verdict.EQUIVALENT, Verdict.SURVIVED]
    counted = report(chosen, found, 3)
    assert (counted["share"], counted["share_of_all"]) == (0.5, 0.3333)


@pytest.mark.parametrize(
    ("line", "change", "reason"), [("no such line", "Lt -> LtE", "x"), ("", "", "x"), ("a < b", "Lt -> LtE", "")]
)
def test_an_equivalent_without_a_mutant_or_a_reason_is_refused(line: str, change: str, reason: str) -> None:
    entry = f"[[equivalent]]\npath = 'core/fold.py'\nline = '{line}'\nchange = '{change}'\nreason = '{reason}'\n"
    with pytest.raises(SystemExit):
        equivalents(entry)


def test_a_fork_reports_failed_late_and_missing_tests(tmp_path: Path) -> None:
    module = tmp_path / "test_some.py"
    module.write_text(
        "import time\ndef test_fails():\n    assert False\ndef test_sleeps():\n    time.sleep(600)\n"
        "def test_passes():\n    pass\n"
    )
    server = ForkServer([str(module)], options=[*PYTEST_OPTIONS, f"--rootdir={tmp_path}"])
    fails, sleeps, passes = (f"test_some.py::test_{name}" for name in ("fails", "sleeps", "passes"))
    try:
        assert server.is_loaded
        found = server.run(None, [passes, fails, sleeps], None)
        assert (len(found.seconds), found.failed) == (2, fails)
        found = server.run(None, [passes, sleeps], [60.0, 0.5])
        assert (len(found.seconds), found.late) == (1, sleeps)
        assert server.run(None, ["test_some.py::test_other"], None).broken
        found = server.run(None, [passes], None)
        assert found == Outcome(found.seconds)
    finally:
        server.close()


SEQ_NR = "src/tidebook/core/seq_nr.py"


def returns_none() -> Mutant:
    every = mutants_of(SEQ_NR, (ROOT / SEQ_NR).read_text())
    return next(each for each in every if each.change == "returns None")


def test_a_mutant_changes_functions_that_are_loaded_and_only_in_its_fork(tmp_path: Path) -> None:
    module = tmp_path / "test_number.py"
    module.write_text("from tidebook.core.seq_nr import seq_nr\ndef test_it():\n    assert seq_nr(1) == 1\n")
    server = ForkServer([str(module)], options=[*PYTEST_OPTIONS, f"--rootdir={tmp_path}"])
    try:
        test = "test_number.py::test_it"
        assert server.run(None, [test], None).failed is None
        assert server.run(returns_none(), [test], None).failed == test
        assert server.run(None, [test], None).failed is None
    finally:
        server.close()


@pytest.mark.parametrize("with_mutant", [False, True])
def test_a_test_module_that_a_mutant_keeps_from_loading_is_noticed(tmp_path: Path, with_mutant: bool) -> None:
    module = tmp_path / "test_loads.py"
    module.write_text("from tidebook.core.seq_nr import seq_nr\nassert seq_nr(1) == 1\ndef test_it():\n    pass\n")
    mutant = returns_none() if with_mutant else None
    server = ForkServer([str(module)], mutant, options=[*PYTEST_OPTIONS, f"--rootdir={tmp_path}"])
    server.close()
    assert server.is_loaded is not with_mutant
