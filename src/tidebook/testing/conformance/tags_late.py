"""Test cases of streams by tag: clock skew, late and lost rows, new journals, a thousand tags."""

from __future__ import annotations

import msgspec
import pytest

from tidebook.core.errors import MissingTaggedEvent
from tidebook.core.event import Event
from tidebook.core.key import Key, partition_of
from tidebook.core.repair import Repair
from tidebook.core.replication_plan import TagRow
from tidebook.runtime.metrics import Metrics
from tidebook.tags.event import TaggedEvent
from tidebook.tags.settings import TagSettings
from tidebook.tags.tags import Tags
from tidebook.testing.clock import ManualClock
from tidebook.testing.conformance.tags_base import HOUR_MS, TagsBase
from tidebook.testing.replicating import replicate
from tidebook.wiring.book import Book

MINUTE_MS = 60_000


def id_in(partition: int, number: int = 0) -> str:
    """Return the id of a journal that is in this partition, of two."""
    found = (f"j-{n}" for n in range(1000) if partition_of(f"j-{n}", 2) == partition)
    for _ in range(number):
        next(found)
    return next(found)


def delayed_tags(book: Book, at_ms: int, **settings: float | str) -> tuple[Tags, ManualClock, Metrics]:
    """Return tags with delay consistency, and a manual clock that starts at this time."""
    clock, metrics = ManualClock(at_ms), Metrics()
    chosen = TagSettings(consistency="delay", page_events=3, **settings)  # type: ignore[arg-type]
    return Tags(store=book.store, clock=clock, metrics=metrics, settings=chosen), clock, metrics


class TagsLate(TagsBase):
    """Test cases of late rows, lost rows, and many tags."""

    async def change_rows(
        self, book: Book, like: TagRow, *, put: tuple[TagRow, ...] = (), cut: tuple[TagRow, ...] = ()
    ) -> None:
        """Remove the rows `cut` from the tag view, as if they were lost, and add `put`, as if they were late."""
        key = Key(like.topic, like.id)
        pointer, head = await book.store.pointer(like.topic, like.partition), await book.store.head(key)
        assert pointer is not None
        assert head is not None
        self.revs = getattr(self, "revs", 0) + 1
        places = tuple(row.place for row in cut)
        repair = Repair(
            key=key, partition=like.partition, pointer=pointer, rev=self.revs, head=head, tags=put, extra_tags=places
        )
        await book.store.repair(repair)

    async def test_events_of_a_clock_that_is_a_minute_slow_are_in_order_before_and_after_a_restart(
        self, book: Book, topic: str, tag: str
    ) -> None:
        ahead, behind = id_in(0), id_in(1)
        journal = book.journal(topic)
        await journal.append(ahead, [Event(-1)])
        seen: list[TaggedEvent] = []
        for n in range(8):
            if n in (2, 5):
                await replicate(book.log, book.store, topic)
                most_ms = (await book.tags.horizon([topic])).most_ms
                await self.advance(book, topic, most_ms + MINUTE_MS, 0)
            await journal.append(ahead if n % 2 else behind, [Event(n, tags={tag})])
            await replicate(book.log, book.store, topic, batches_max=1)
            # Restart a query after the last offset that another query returned.
            seen += await self.read(book, tag, topic, after=seen[-1].tag_offset if seen else None)
        await self.settle(book, topic)
        seen += await self.read(book, tag, topic, after=seen[-1].tag_offset if seen else None)
        assert sorted(event.payload for event in seen) == list(range(8))
        places = [event.place for event in seen]
        assert places == sorted(places), "the order does not depend on the clocks"
        assert await self.read(book, tag, topic) == seen

    async def test_a_new_topic_holds_the_horizon_and_its_events_follow_those_already_delivered(
        self, book: Book, topic: str, tag: str
    ) -> None:
        new = f"{topic}-new"
        await book.journal(topic).append("a", [Event("old")])
        await replicate(book.log, book.store, topic)
        await self.advance(book, topic, (await book.tags.horizon([topic])).most_ms + HOUR_MS)
        await book.journal(topic).append("a", [Event("first", tags={tag})])
        await self.settle(book, topic)
        (first,) = await self.read(book, tag, topic)
        await book.journal(new).append("b", [Event("second", tags={tag})])
        assert (await book.tags.horizon([topic, new])).topic == new
        assert await self.read(book, tag, topic, new, after=first.tag_offset) == []
        await self.settle(book, new, topic)
        (second,) = await self.read(book, tag, topic, new, after=first.tag_offset)
        assert second.payload == "second"
        assert second.place > first.place, "the event is an hour late by the clock, but not by log time"

    async def test_lost_rows_are_found_with_delay_consistency_however_old_they_are(
        self, book: Book, topic: str, tag: str
    ) -> None:
        journal = book.journal(topic)
        for n in range(4):
            await journal.append("a", [Event(n, tags={tag})])
            await journal.append("b", [Event(n + 10, tags={tag})])
            await replicate(book.log, book.store, topic)
            if n == 1:
                most_ms = (await book.tags.horizon([topic])).most_ms
                await self.advance(book, topic, most_ms + 5 * HOUR_MS)
        await self.settle(book, topic)
        events = await self.read(book, tag, topic)
        rows = [event.row for event in events if event.id == "a"]
        await self.change_rows(book, rows[0], cut=(rows[1], rows[2]))
        assert len(await self.read(book, tag, topic)) == 6
        tags, _, metrics = delayed_tags(book, events[-1].place.time_ms + MINUTE_MS)
        found = [event async for event in tags.read(tag, topics=[topic])]
        assert sorted(found, key=lambda event: event.place) == events
        assert [event.payload for event in found if event.id == "a"] == [0, 1, 2, 3]
        assert metrics.counted("tags_gaps_found") == 1

    async def test_a_number_that_cannot_be_found_fails_the_stream_and_names_where_to_resume(
        self, book: Book, topic: str, tag: str
    ) -> None:
        await book.journal(topic).append("a", [Event(n, tags={tag}) for n in range(5)])
        await self.settle(book, topic)
        rows = [event.row for event in await self.read(book, tag, topic)]
        # The head is replicated less far than the tag view, so the view has numbers above the head's count.
        far = msgspec.structs.replace(rows[-1], time_ms=rows[-1].time_ms + 1, tag_seq_nr=9)
        await self.change_rows(book, rows[0], put=(far,))
        tags, _, _ = delayed_tags(book, rows[-1].time_ms + MINUTE_MS, missing_timeout_s=0.0)
        seen: list[int] = []

        async def read() -> None:
            async for event in tags.read(tag, topics=[topic]):
                seen.append(event.tag_seq_nr)

        with pytest.raises(MissingTaggedEvent) as raised:
            await read()
        assert seen == [1, 2, 3, 4, 5]
        assert raised.value.missing == (6, 8)
        await self.change_rows(book, rows[0], cut=(far,))
        again = tags.read(tag, topics=[topic], after=raised.value.last_known_offset)
        assert [event async for event in again] == []

    async def test_a_late_row_of_a_journal_without_another_is_found_by_backtracking(
        self, book: Book, topic: str, tag: str
    ) -> None:
        journal = book.journal(topic)
        await journal.append("late", [Event("late", tags={tag})])
        await replicate(book.log, book.store, topic)
        await journal.append("a", [Event("a", tags={tag})])
        await self.settle(book, topic)
        events = await self.read(book, tag, topic)
        row = next(event.row for event in events if event.id == "late")
        await self.change_rows(book, row, cut=(row,))
        tags, clock, metrics = delayed_tags(book, events[-1].place.time_ms + MINUTE_MS, back_track_period_s="max")
        stream = tags.read(tag, topics=[topic], follow=True)
        assert (await anext(stream)).payload == "a"
        await self.change_rows(book, row, put=(row,))
        clock.advance(1500)
        assert (await anext(stream)).payload == "late"
        assert metrics.counted("tags_delayed_found") == 1
        await stream.aclose()  # type: ignore[attr-defined]

    async def test_a_query_that_begins_in_the_current_bucket_knows_its_journals_numbers(
        self, book: Book, topic: str, tag: str
    ) -> None:
        await book.journal(topic).append("a", [Event(n, tags={tag}) for n in range(4)])
        await self.settle(book, topic)
        events = await self.read(book, tag, topic)
        tags, clock, metrics = delayed_tags(book, events[-1].place.time_ms + 6000)
        for n, event in enumerate(events):
            found = tags.read(tag, topics=[topic], after=event.tag_offset)
            assert [each async for each in found] == events[n + 1 :]
        # The query looks up a journal that is in no scanned bucket, and accepts its number.
        clock.advance(3 * HOUR_MS)
        await self.advance(book, topic, clock.now_ms())
        await book.journal(topic).append("a", [Event(4, tags={tag})])
        await self.settle(book, topic)
        clock.advance(MINUTE_MS)
        after = events[-1].tag_offset
        assert [each.payload async for each in tags.read(tag, topics=[topic], after=after)] == [4]
        assert metrics.counted("tags_events_missing") == 0

    async def test_a_thousand_tags_of_one_journal_each_have_their_stream(
        self, book: Book, topic: str, tag: str
    ) -> None:
        names = [f"{tag}-{n:04}" for n in range(1000)]
        for i in range(0, 1000, 100):
            await book.journal(topic).append("a", [Event(name, tags={name, tag}) for name in names[i : i + 100]])
        await self.settle(book, topic)
        for name in names[::37]:
            (event,) = await self.read(book, name, topic)
            assert (event.payload, event.tag_seq_nr) == (name, 1)
            assert event.tags == {name, tag}
        numbers = [event.tag_seq_nr for event in await self.read(book, tag, topic)]
        assert numbers == list(range(1, 1001))
        assert {each async for each in book.tags.list()} >= {tag, *names}

    async def test_an_event_with_more_than_ten_tags_is_in_all_their_streams_and_logs_a_warning(
        self, book: Book, topic: str, tag: str
    ) -> None:
        names = {f"{tag}-{n}" for n in range(12)}
        with pytest.warns(UserWarning, match="12 tags"):
            await book.journal(topic).append("a", [Event(1, tags=names)])
        await self.settle(book, topic)
        for name in names:
            assert [event.payload for event in await self.read(book, name, topic)] == [1]
