"""On a simulated cluster, the store becomes the fold of the log even if the log has arbitrary records."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("acsylla")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.simulation.history import IDS, History, HistoryBuilder, append
from tests.simulation.simulation import Run, simulate
from tests.simulation.virtual_time import VirtualTimeLoop
from tests.unit.core.nonsense import NONSENSE, rests, sealed
from tidebook.core.action import Delete, Purge
from tidebook.core.position import FIRST_EPOCH
from tidebook.core.record import MAGIC, VERSION, read_record
from tidebook.core.seq_nr import LAST

#: A record of a later epoch stops a process with this configuration, which another test covers.
values = rests.map(lambda rest: sealed(MAGIC, VERSION, rest)).filter(
    lambda value: getattr(read_record(value, limit_bytes=10**6), "epoch", FIRST_EPOCH) <= FIRST_EPOCH
)


class UnreadRun(Run):
    """A run without readers, because a damaged payload makes only the read fail."""

    async def _read_journals(self, seed: float) -> None:
        pass


def history_of(content: Sequence[tuple[str, bytes]], *, end: str = "") -> History:
    """Return a log: an append to each journal, `content`, one more append, and perhaps a delete or purge of all."""
    builder = HistoryBuilder()
    for offset, id in enumerate(IDS):
        builder.append(id, append(offset, 3, tags=["x"]))
    for id, value in content:
        builder.append_value(id, value, key=id.encode(), shown=value[:200].hex())
    for id in IDS:
        builder.append(id, append(1_000_000 + len(content), 1, tags=["y"]))
        if end:
            builder.append(id, Delete(FIRST_EPOCH, LAST) if end == "delete" else Purge(FIRST_EPOCH))
    return builder.history()


def test_the_store_is_the_fold_of_arbitrary_records(loop: VirtualTimeLoop, long_form: bool) -> None:
    @settings(
        max_examples=1_000 if long_form else 60,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(st.lists(st.tuples(st.sampled_from(IDS), values), max_size=6), st.sampled_from(["", "delete", "purge"]),
           st.integers(0, 10**6))  # fmt: skip
    def holds(content: list[tuple[str, bytes]], end: str, seed: int) -> None:
        wrong = simulate(loop, seed, history_of(content, end=end), run_type=UnreadRun)
        assert wrong is None, wrong

    holds()


@pytest.mark.parametrize("end", ["", "delete", "purge"])
def test_the_store_skips_void_records(loop: VirtualTimeLoop, end: str) -> None:
    small = [("a", sealed(MAGIC, VERSION, rest)) for rest in NONSENSE.values() if len(rest) < 100_000]
    for seed in range(3):
        wrong = simulate(loop, seed, history_of(small, end=end), run_type=UnreadRun)
        assert wrong is None, wrong
