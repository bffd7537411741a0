"""Run every kept input of the fuzz targets as an ordinary test, so that no failure that was found returns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS, close

CORPUS = Path(__file__).parent / "corpus"
KEPT = sorted(each for each in CORPUS.glob("*/*") if each.is_file())


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    close()


def test_every_target_has_a_corpus_and_every_corpus_a_target() -> None:
    assert {each.parent.name for each in KEPT} == set(TARGETS)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", TARGETS)
def test_the_kept_inputs_of_a_target_do_not_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TIDEBOOK", "TIDEBOOK_TRACEBACK"):
        monkeypatch.setenv(variable, "")  # restored at the end: the target of the command line sets them
    for file in KEPT:
        if file.parent.name == name:
            try:
                TARGETS[name](file.read_bytes())
            except BaseException as error:
                error.add_note(f"input: {file.relative_to(CORPUS)}")
                raise
