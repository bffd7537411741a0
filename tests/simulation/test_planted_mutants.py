"""The simulation must find each fault that is planted in the Cassandra store, or its success proves nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import pytest

pytest.importorskip("acsylla")

from tests.simulation.history import History, HistoryBuilder, append
from tests.simulation.simulation import simulate
from tests.simulation.virtual_time import VirtualTimeLoop
from tidebook.core.action import Action, Delete, Purge
from tidebook.core.errors import TidebookError
from tidebook.core.key import Key
from tidebook.core.position import FIRST_EPOCH, START
from tidebook.core.replication_plan import ClearEvents, ClearJournal, EventRow, PutEvents, SliceWrites
from tidebook.store.cassandra import mutations, repair, tag_views
from tidebook.store.cassandra import store as stores
from tidebook.store.cassandra.mutations import Batch
from tidebook.store.cassandra.scan import EventPages
from tidebook.store.cassandra.session import CassandraSession
from tidebook.store.cassandra.tag_views import TagViews

#: An upper bound; most mutants are found within a tenth of it.
SEEDS_MAX = 600
SEEDS_WITHOUT = 60

Plant = Callable[[pytest.MonkeyPatch], None]


def log(*actions: Action, segment_size: int = 5) -> History:
    """Return a log of one journal."""
    builder = HistoryBuilder(segment_size=segment_size)
    for action in actions:
        builder.append("a", action)
    return builder.history()


def delete(to: int) -> Delete:
    return Delete(FIRST_EPOCH, to)


def purge() -> Purge:
    return Purge(FIRST_EPOCH)


# ---- packed rows


def does_not_cut_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed row that this slice writes without its deleted part is not rewritten over the writes of others."""
    monkeypatch.setattr(repair, "_is_partly_deleted", lambda first, to: first.seq_nr <= to)


def cuts_rows_of_other_incarnations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delete rewrites the rest of a packed row although the row belongs to a purged incarnation."""
    rows_after_delete = repair.rows_after_delete

    async def of_any_incarnation(
        pages: EventPages, writes: SliceWrites, *, at_once: int
    ) -> Mapping[Key, Sequence[EventRow]]:
        def forget_incarnation(write: Any) -> Any:
            if not isinstance(write, ClearEvents):
                return write
            head = msgspec.structs.replace(write.head, incarnation=START)
            return msgspec.structs.replace(write, head=head)

        keys = tuple(tuple(map(forget_incarnation, of_key)) for of_key in writes.keys)
        return await rows_after_delete(pages, msgspec.structs.replace(writes, keys=keys), at_once=at_once)

    monkeypatch.setattr(stores, "rows_after_delete", of_any_incarnation)


def leaves_cut_rows_at_their_own_stamp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a packed row does not win over the whole row."""

    def rewrite_remaining(write: ClearEvents, rows: Sequence[EventRow]) -> Iterator[Batch]:
        return mutations.event_batches(PutEvents(write.key, write.head, tuple(rows)))

    monkeypatch.setattr(mutations, "_rewrite_remaining", rewrite_remaining)


# ---- clears


def _without(monkeypatch: pytest.MonkeyPatch, is_dropped: Callable[[ClearJournal, Batch], bool]) -> None:
    clear_journal = mutations.clear_journal

    def clear_some(write: ClearJournal, *others: Any) -> Iterator[Batch]:
        return (batch for batch in clear_journal(write, *others) if not is_dropped(write, batch))

    monkeypatch.setattr(mutations, "clear_journal", clear_some)


def clears_from_delete_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A purge assumes that deleted events have been cleared."""

    def is_dropped(write: ClearJournal, batch: Batch) -> bool:
        [statement] = batch
        first = write.head.delete_to // write.head.segment_size
        return statement.cql.startswith("DELETE FROM journal ") and statement.values[3] < first

    _without(monkeypatch, is_dropped)


def keeps_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A purge keeps the snapshots of the incarnation that it ends."""
    _without(monkeypatch, lambda _, batch: "snapshot" in batch[0].cql)


def drops_tag_clears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleted events stay in the streams of their tags."""

    async def nothing(*_: Any) -> AsyncIterator[Iterator[Batch]]:
        return
        yield

    monkeypatch.setattr(TagViews, "clear_rounds", nothing)


def clears_only_tags_that_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tag rows that only another replicator may have written, or may write later, are not cleared."""
    clear = TagViews._clear

    def clear_written(self: TagViews, write: ClearEvents | ClearJournal, *others: Any) -> Any:
        return clear(self, msgspec.structs.replace(write, unwritten=()), *others)

    monkeypatch.setattr(TagViews, "_clear", clear_written)


def clears_the_first_page_of_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first page of a long journal's tag rows is cleared."""
    clear = TagViews._clear

    async def clear_one_page(self: TagViews, *writes: Any) -> AsyncIterator[Iterator[Batch]]:
        pages = 0
        async for page in clear(self, *writes):
            pages += 1
            if pages <= 2:
                yield page

    monkeypatch.setattr(tag_views, "CLEAR_PAGE", 2)
    monkeypatch.setattr(TagViews, "_clear", clear_one_page)


# ---- stamps, order and acknowledgements


def writes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that too few replicas have acknowledged counts as done."""

    async def write(self: CassandraSession, batch: Batch) -> None:
        try:
            await self.write_once(batch[0]) if len(batch) == 1 else await self._attempt(batch)
        except Exception as error:
            if not isinstance(error, TidebookError) and not type(error).__name__.startswith("CassError"):
                raise

    monkeypatch.setattr(CassandraSession, "write", write)


def awaits_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rounds of a slice are sent concurrently."""
    batch_rounds = mutations.batch_rounds
    monkeypatch.setattr(stores, "batch_rounds", lambda *given: iter([chain.from_iterable(batch_rounds(*given))]))


def moves_the_pointer_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pointer is written before the data that it covers."""
    batch_rounds = mutations.batch_rounds
    monkeypatch.setattr(stores, "batch_rounds", lambda *given: reversed([list(each) for each in batch_rounds(*given)]))


def stamps_all_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """All writes have the same stamp, so that the one with the greater bytes wins."""
    monkeypatch.setattr(mutations, "write_stamp", lambda position, rev=0: 1 << 60)


class Planted(NamedTuple):
    plant: Plant
    #: The log on which the mutant is found; None means random logs.
    log: History | None = None


CUT = log(append(0, 3), delete(2))
PLANTED = [
    Planted(does_not_cut_again, CUT),
    Planted(cuts_rows_of_other_incarnations, log(append(0, 3), purge(), append(2, 2), append(3, 1), delete(2))),
    Planted(leaves_cut_rows_at_their_own_stamp, CUT),
    Planted(clears_from_delete_to, log(append(0, 3), delete(2), purge(), segment_size=2)),
    Planted(keeps_snapshots, log(append(0, 1), purge())),
    Planted(drops_tag_clears, log(append(0, 3, tags="x"), delete(2))),
    Planted(clears_only_tags_that_are_written, log(append(0, 3, tags="x"), delete(2))),
    Planted(clears_the_first_page_of_tags, log(append(0, 5, tags="x"), delete(4))),
    Planted(writes_once),
    Planted(awaits_no_round),
    Planted(moves_the_pointer_first),
    Planted(stamps_all_alike),
]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.plant.__name__)
def test_a_planted_mutant_is_found(loop: VirtualTimeLoop, planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.plant(monkeypatch)
    found = next((seed for seed in range(SEEDS_MAX) if simulate(loop, seed, planted.log)), None)
    assert found is not None, f"no seed below {SEEDS_MAX} finds {planted.plant.__name__}"


@pytest.mark.parametrize(
    "planted", [each for each in PLANTED if each.log is not None], ids=lambda each: each.plant.__name__
)
def test_the_unchanged_store_passes_on_the_log_of_each_mutant(loop: VirtualTimeLoop, planted: Planted) -> None:
    for seed in range(SEEDS_WITHOUT):
        wrong = simulate(loop, seed, planted.log)
        assert wrong is None, wrong
