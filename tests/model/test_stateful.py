"""The journal's API against a plain list, on the real embedded log and store.

Replication runs at any moment, in batches of any size; the log is truncated after it; the book is closed and opened
again; a second book works on the same folder. Over a log with an index by key, and over one that is like Kafka.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from tests.model.plain import Plain
from tests.unit.journal.rig import TOPIC, Kind, Rig
from tidebook.core.errors import Conflict, InvalidInput, NotFound, OutcomeUnknown
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.seq_nr import LAST
from tidebook.runtime.blocking_portal import BlockingPortal

SLOTS = 3
ids = st.sampled_from(["a", "b", "ä"])
near = st.integers(-2, 7)
books = st.integers(0, 1)


class JournalMachine(RuleBasedStateMachine):
    """Two books on one folder, and a plain list a journal."""

    kind: ClassVar[Kind]

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="tidebook-"))
        self.portal = BlockingPortal()
        self.rigs = [self.open_rig(), self.open_rig()]
        self.plain: dict[str, Plain] = {}
        self.payload = 0
        self.heads: list[tuple[str, Head]] = []

    def open_rig(self) -> Rig:
        async def make() -> Rig:
            return Rig(self.folder, self.kind, follow_s=0, cached_heads_max=2, page_events=2, tail_bytes_max=40)

        return self.portal.run(make())

    def teardown(self) -> None:
        for rig in self.rigs:
            self.portal.run(rig.close())
        self.portal.close()
        shutil.rmtree(self.folder)

    def of(self, id: str) -> Plain:
        return self.plain.setdefault(id, Plain())

    def payloads(self, count: int) -> list[int]:
        self.payload += count
        return list(range(self.payload - count, self.payload))

    # ---- writing

    @rule(book=books, id=ids, count=st.integers(1, 7), confirm=st.booleans())
    def append_next(self, book: int, id: str, count: int, confirm: bool) -> None:
        self.append(book, id, count, confirm=confirm)

    @rule(book=books, id=ids, off=st.sampled_from([0, 0, 0, -1, 1]))
    def append_expected(self, book: int, id: str, off: int) -> None:
        self.append(book, id, 2, expected=max(0, self.of(id).last + off))

    @rule(book=books, id=ids, off=near)
    def append_at(self, book: int, id: str, off: int) -> None:
        self.append(book, id, 1, at=max(1, self.of(id).last + off))

    @rule(book=books, id=ids)
    def append_beyond_many_segments(self, book: int, id: str) -> None:
        if self.of(id).last < LAST // 4:
            self.append(book, id, 1, at=2 * self.of(id).last + 10**6)

    def append(self, book: int, id: str, count: int, *, confirm: bool = True, **how: Any) -> None:
        plain, new = self.of(id), self.payloads(count)
        append_id = self.payload.to_bytes(16, "big")
        first = plain.append(append_id, new, expected=how.get("expected"), at=how.get("at"))
        doing = self.rigs[book].append(id, *new, append_id=append_id, confirm=confirm, **how)
        if first is None:
            with pytest.raises(Conflict) as caught:
                self.portal.run(doing)
            assert caught.value.found == plain.last
        else:
            done = self.portal.run(doing)
            assert (done.first, done.last) in [(first, plain.last), *([] if confirm else [(None, None)])]

    @precondition(lambda self: any(plain.appended for plain in self.plain.values()))
    @rule(book=books, data=st.data(), late=st.booleans())
    def repeat_an_append(self, book: int, data: st.DataObject, late: bool) -> None:
        id = data.draw(st.sampled_from([id for id, plain in self.plain.items() if plain.appended]))
        plain = self.plain[id]
        append_id, first, last = data.draw(st.sampled_from(plain.appended))
        retry = OutcomeUnknown("no answer", append_id=append_id, floor=0, epoch=1)
        doing = self.rigs[book].append(id, *range(last - first + 1), retry=retry)
        if plain.known(append_id) is None:
            with pytest.raises(OutcomeUnknown):
                self.portal.run(doing)
        else:
            done = self.portal.run(doing)
            assert (done.first, done.last) == (first, last)

    @rule(book=books, id=ids, off=near)
    def delete(self, book: int, id: str, off: int) -> None:
        to = max(1, self.of(id).last - 2 + off)
        self.of(id).delete(to)
        self.portal.run(self.rigs[book].journal.delete(id, to=to))

    @rule(book=books, id=ids)
    def purge(self, book: int, id: str) -> None:
        self.of(id).purge()
        self.portal.run(self.rigs[book].journal.purge(id))

    # ---- expiry, decided from a head that may be an old one

    @rule(book=books, id=ids)
    def look_at_the_head(self, book: int, id: str) -> None:
        head = self.portal.run(self.rigs[book].store.head(Key(TOPIC, id)))
        if head is not None and head.live:
            self.heads.append((id, head))

    @precondition(lambda self: self.heads)
    @rule(book=books, data=st.data())
    def purge_if_nothing_has_changed(self, book: int, data: st.DataObject) -> None:
        id, head = data.draw(st.sampled_from(self.heads))
        rig = self.rigs[book]

        async def expire() -> bool:
            partition = (await rig.journal._open_or_create()).partition(id)
            now = await partition.head(id, "mark")
            await rig.journal.purge_expired(id, head)
            return now is not None and now.live and now.position == head.position

        if self.portal.run(expire()):
            self.of(id).purge()

    # ---- what goes on beneath

    @rule(batch=st.integers(1, 9), most=st.none() | st.integers(1, 3))
    def replicate(self, batch: int, most: int | None) -> None:
        self.portal.run(self.rigs[0].journal.create())
        self.portal.run(self.rigs[0].replicate(batch_records=batch, batches_max=most))

    @rule()
    def cut_the_log_behind_replication(self) -> None:
        async def cut() -> None:
            pointer = await self.rigs[0].store.pointer(TOPIC, 0)
            if pointer is not None:
                await self.rigs[0].log.truncate(TOPIC, 0, before=pointer.position.offset + 1)

        self.portal.run(cut())

    @rule(book=books)
    def close_and_open_again(self, book: int) -> None:
        self.portal.run(self.rigs[book].close())
        self.rigs[book] = self.open_rig()

    @rule(value=st.binary(max_size=5), id=ids)
    def somebody_writes_poison(self, value: bytes, id: str) -> None:
        self.portal.run(self.rigs[0].write_raw(id.encode(), value))

    # ---- snapshots

    @rule(book=books, id=ids, off=near)
    def save_snapshot(self, book: int, id: str, off: int) -> None:
        plain, number = self.of(id), max(1, self.of(id).last - 3 + off)
        self.payload += 1
        saving = self.rigs[book].journal.save_snapshot(id, seq_nr=number, payload=self.payload)
        if plain.incarnation is None or number > plain.last:
            with pytest.raises((NotFound, InvalidInput)):
                self.portal.run(saving)
        else:
            self.portal.run(saving)
            plain.save(number, self.payload, SLOTS)

    @rule(book=books, id=ids)
    def load_snapshot(self, book: int, id: str) -> None:
        found = self.portal.run(self.rigs[book].journal.load_snapshot(id))
        assert (None if found is None else (found.seq_nr, found.payload)) == self.of(id).load()

    # ---- reading

    @rule(book=books, id=ids, start=st.integers(1, 12), length=st.integers(0, 9))
    def read_a_range(self, book: int, id: str, start: int, length: int) -> None:
        assert self.read(book, id, start, start + length) == self.of(id).read(start, start + length)

    @rule(book=books, id=ids, off=st.integers(-4, 2))
    def read_the_end(self, book: int, id: str, off: int) -> None:
        start = max(1, self.of(id).last + off)
        assert self.read(book, id, start, LAST) == self.of(id).read(start, LAST)

    @rule(book=books)
    def list_the_ids(self, book: int) -> None:
        found = list(self.portal.iterate(self.rigs[book].journal.ids()))
        assert sorted(found) == sorted(id for id, plain in self.plain.items() if plain.incarnation is not None)

    @invariant()
    def both_books_see_every_journal_as_it_is(self) -> None:
        for book in (0, 1):
            for id, plain in self.plain.items():
                assert self.portal.run(self.rigs[book].journal.pointer(id)) == (
                    plain.last if plain.incarnation else None
                )
        for id, plain in self.plain.items():
            assert self.read(0, id, 1, LAST) == plain.read(1, LAST)

    def read(self, book: int, id: str, start: int, end: int) -> list[tuple[int, int]]:
        events = self.portal.iterate(self.rigs[book].journal.read(id, start=start, end=end))
        return [(event.seq_nr, event.payload) for event in events]


class IndexedMachine(JournalMachine):
    kind = "indexed"


class LikeKafkaMachine(JournalMachine):
    kind = "like kafka"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", [IndexedMachine, LikeKafkaMachine])
def test_a_journal_is_a_plain_list_whatever_goes_on_beneath(machine: type[JournalMachine], long_form: bool) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=300 if long_form else 15,
            stateful_step_count=40 if long_form else 25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
