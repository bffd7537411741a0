"""The conformance suite of streams by tag, for any log and store. An adapter's tests subclass it:

    class TestMyTags(TagsContract):
        @pytest.fixture
        def book_factory(self, tmp_path):
            return lambda **journal: open_my_book(tmp_path, journal)

Each call of the factory opens another book on the same data.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from tidebook.core.buckets import LEAD_MS
from tidebook.core.errors import InvalidInput
from tidebook.core.event import Event
from tidebook.core.key import Key
from tidebook.core.repair import Repair
from tidebook.core.replication_plan import TagRow
from tidebook.tags.horizon import NEVER_MS, read_horizon
from tidebook.tags.settings import TagSettings
from tidebook.tags.tags import Tags
from tidebook.testing.clock import ManualClock
from tidebook.testing.conformance.journal_base import BookFactory
from tidebook.testing.conformance.tags_base import HOUR_MS, OPTIONS
from tidebook.testing.conformance.tags_late import TagsLate
from tidebook.testing.conformance.tags_sizes import TagsSizes
from tidebook.testing.replicating import replicate
from tidebook.wiring.book import Book


class TagsContract(TagsLate, TagsSizes):
    """Subclass it and provide the fixture `book_factory`."""

    async def test_the_stream_is_the_filter_of_the_journals_in_the_order_of_the_log(
        self, book: Book, topic: str, tag: str
    ) -> None:
        journal = book.journal(topic)
        for n in range(6):
            await journal.append(f"j-{n % 2}", [Event(n, tags={tag} if n != 3 else {"other"}), Event("untagged")])
        await self.settle(book, topic)
        events = await self.read(book, tag, topic)
        assert sorted(event.payload for event in events) == [0, 1, 2, 4, 5]
        for id, payloads in (("j-0", [0, 2, 4]), ("j-1", [1, 5])):
            journal_events = [event for event in events if event.id == id]
            assert [event.payload for event in journal_events] == payloads
            assert [event.tag_seq_nr for event in journal_events] == list(range(1, len(payloads) + 1))
        assert events[0].topic == topic
        assert events[0].tags == {tag}

    async def test_a_stream_can_be_resumed_after_each_of_its_offsets(self, book: Book, topic: str, tag: str) -> None:
        journal = book.journal(topic)
        await journal.append("a", [Event(n, tags={tag}) for n in range(4)])
        await journal.append("b", [Event(n, tags={tag}) for n in range(4)])
        await self.settle(book, topic)
        events = await self.read(book, tag, topic)
        assert len(events) == 8
        for n, event in enumerate(events):
            assert await self.read(book, tag, topic, after=event.tag_offset) == events[n + 1 :]

    async def test_a_stream_can_begin_at_a_time(self, book: Book, topic: str, tag: str) -> None:
        journal = book.journal(topic)
        await journal.append("a", [Event(1, tags={tag})])
        await self.settle(book, topic)
        (event,) = await self.read(book, tag, topic)
        # The log time of a new topic is at least that of all other topics, which may be later than the clock.
        moment = datetime.fromtimestamp(event.place.time_ms / 1000, UTC)
        assert await self.read(book, tag, topic, after=moment - timedelta(hours=1)) == [event]
        assert await self.read(book, tag, topic, after=moment + timedelta(hours=1)) == []

    async def test_nothing_is_delivered_that_is_not_below_the_horizon(self, book: Book, topic: str, tag: str) -> None:
        journal = book.journal(topic)
        await journal.append("a", [Event(1, tags={tag})])
        assert await self.read(book, tag, topic) == []
        await replicate(book.log, book.store, topic)
        horizon = await read_horizon(book.store, [topic])
        below = [event for event in await self.read(book, tag, topic) if event.timestamp_ms >= horizon.time_ms]
        assert below == []

    async def test_a_topic_that_is_not_replicated_holds_the_others_back_and_is_named(
        self, book: Book, topic: str, tag: str
    ) -> None:
        stuck = f"{topic}-stuck"
        await book.journal(topic).append("a", [Event(1, tags={tag})])
        await book.journal(stuck).append("a", [Event(2)])
        await self.settle(book, topic)
        assert len(await self.read(book, tag, topic)) == 1
        assert await self.read(book, tag, topic, stuck) == []
        horizon = await book.tags.horizon([topic, stuck])
        assert (horizon.topic, horizon.time_ms) == (stuck, NEVER_MS)
        await self.settle(book, stuck)
        await book.journal(topic).append("b", [Event(3, tags={tag})])
        await self.settle(book, topic)
        horizon = await book.tags.horizon([topic, stuck])
        assert horizon.topic == stuck
        assert NEVER_MS < horizon.time_ms < horizon.most_ms

    async def test_deleted_and_purged_events_leave_the_stream(self, book: Book, topic: str, tag: str) -> None:
        journal = book.journal(topic)
        for id in ("kept", "cut", "gone"):
            await journal.append(id, [Event(f"{id}-{n}", tags={tag}) for n in range(3)])
        await self.settle(book, topic)
        await journal.delete("cut", to=2)
        await journal.purge("gone")
        await journal.append("gone", [Event("again", tags={tag})])
        await self.settle(book, topic)
        events = await self.read(book, tag, topic)
        assert sorted(event.payload for event in events) == ["again", "cut-2", "kept-0", "kept-1", "kept-2"]
        assert {event.payload: event.tag_seq_nr for event in events}["again"] == 1
        assert {event.payload: event.tag_seq_nr for event in events}["cut-2"] == 3

    async def test_numbers_do_not_depend_on_how_the_log_was_sliced(self, book: Book, topic: str, tag: str) -> None:
        journal = book.journal(topic)
        for n in range(7):
            await journal.append("a", [Event(n, tags={tag})] * 2)
            if n == 4:
                await journal.delete("a", to=3)
        for _ in range(3):
            await replicate(book.log, book.store, topic, batch_records=2, batches_max=1)
        await self.settle(book, topic)
        assert [event.tag_seq_nr for event in await self.read(book, tag, topic)] == list(range(4, 15))

    async def test_a_replay_writes_the_same_rows(self, book: Book, topic: str, tag: str) -> None:
        journal = book.journal(topic)
        await journal.append("a", [Event(n, tags={tag}) for n in range(3)])
        await self.settle(book, topic)
        before = await self.read(book, tag, topic)
        await self.settle(book, topic)
        assert await self.read(book, tag, topic) == before

    async def test_a_follower_gets_later_events(self, book: Book, topic: str, tag: str) -> None:
        journal = book.journal(topic)
        await journal.append("a", [Event(0, tags={tag})])
        await self.settle(book, topic)
        seen: asyncio.Queue[int] = asyncio.Queue()

        async def follow() -> None:
            async for event in book.tags.read(tag, follow=True, topics=[topic]):
                seen.put_nowait(event.payload)

        task = asyncio.create_task(follow())
        try:
            assert await asyncio.wait_for(seen.get(), 30) == 0
            for n in (1, 2):
                await journal.append("b", [Event(n, tags={tag})])
                await self.settle(book, topic)
                assert await asyncio.wait_for(seen.get(), 30) == n
        finally:
            task.cancel()

    async def test_a_stream_with_delay_consistency_is_the_same_stream(self, book: Book, topic: str, tag: str) -> None:
        journal = book.journal(topic)
        for n in range(7):
            await journal.append(f"j-{n % 2}", [Event(n, tags={tag}), Event(n + 100, tags={tag})])
        await journal.delete("j-0", to=3)
        await self.settle(book, topic)
        events = await self.read(book, tag, topic)
        clock = ManualClock(events[0].place.time_ms + 5000)
        tags = Tags(store=book.store, clock=clock, settings=TagSettings(consistency="delay", page_events=3))
        assert [event async for event in tags.read(tag, topics=[topic])] == []
        clock.advance(60_000)
        assert [event async for event in tags.read(tag, topics=[topic])] == events
        for n, event in enumerate(events):
            found = [each async for each in tags.read(tag, topics=[topic], after=event.tag_offset)]
            assert found == events[n + 1 :]

    async def test_a_stream_without_an_offset_begins_at_the_first_time_bucket(
        self, book: Book, topic: str, tag: str
    ) -> None:
        for n in range(3):
            await book.journal(topic).append("a", [Event(n, tags={tag})])
        await self.settle(book, topic)
        events = await self.read(book, tag, topic)
        for first, found in (("2020-01-01", events), ("2100-01-01", [])):
            tags = Tags(store=book.store, clock=book.clock, settings=TagSettings(first_time_bucket=first))
            assert [event async for event in tags.read(tag, topics=[topic])] == found
            behind = [event async for event in tags.read(tag, topics=[topic], after=events[0].tag_offset)]
            assert behind == events[1:]

    async def test_a_group_shares_the_journals(self, book: Book, topic: str, tag: str) -> None:
        for n in range(10):
            await book.journal(topic).append(f"j-{n}", [Event(n, tags={tag})])
        await self.settle(book, topic)
        async with book.tags.subscribe(tag, "mail", topics=[topic], follow=False) as first:
            seen = []
            async for event in first:
                seen.append(event.payload)
                await first.commit(event)
        assert sorted(seen) == list(range(10))
        async with book.tags.subscribe(tag, "mail", topics=[topic], follow=False) as second:
            assert [event async for event in second] == []

    async def test_deleted_events_stay_in_the_stream_if_the_settings_keep_them(
        self, book: Book, topic: str, tag: str
    ) -> None:
        await self.keep_deleted(book, topic, tag)
        assert len(await self.read(book, tag, topic)) == 6

    async def test_a_stream_crosses_a_change_of_the_bucket_size_and_a_year_without_events(
        self, book_factory: BookFactory, topic: str, tag: str
    ) -> None:
        async with book_factory(**OPTIONS) as book:
            await book.journal(topic).append("a", [Event(0, tags={tag})])
            await self.settle(book, topic)
            size = (await book.tags.buckets()).changes[-1].size
            sizes = await book.tags.set_bucket_size("hour" if size == "minute" else "minute")
            assert sizes.changes[-1].from_ms >= int(datetime.now(UTC).timestamp() * 1000) + LEAD_MS
        async with book_factory(**OPTIONS) as book:
            for n, ahead_ms in enumerate((-2, 0, 1, 90_000, 3 * HOUR_MS), start=1):
                await self.advance(book, topic, sizes.changes[-1].from_ms + ahead_ms)
                await book.journal(topic).append("a", [Event(n, tags={tag})])
                await self.settle(book, topic)
            events = await self.read(book, tag, topic)
            assert [event.payload for event in events] == list(range(6))
            for n, event in enumerate(events):
                assert await self.read(book, tag, topic, after=event.tag_offset) == events[n + 1 :]
            before = book.metrics.counted("tag_pages")
            begin = datetime.now(UTC) - timedelta(days=365)
            assert len(await self.read(book, tag, topic, after=begin)) == 6
            assert book.metrics.counted("tag_pages") - before < 20
            await book.journal(topic).delete("a", to=6)
            await self.settle(book, topic)
            assert await self.read(book, tag, topic) == []

    async def test_a_damaged_tag_is_rebuilt_from_the_journals(self, book: Book, topic: str, tag: str) -> None:
        journal = book.journal(topic)
        for n in range(12):
            await journal.append(f"j-{n % 3}", [Event(n, tags={tag, f"{tag}-2"}), Event("not it")])
        await journal.delete("j-0", to=3)
        await journal.purge("j-1")
        await journal.append("j-1", [Event("again", tags={tag})])
        await self.settle(book, topic)
        events = await self.read(book, tag, topic)
        others = await self.read(book, f"{tag}-2", topic)
        await self.damage_rows(book, [event.row for event in events])
        assert await self.read(book, tag, topic) != events
        done = await book.tags.rebuild(tag, topics=[topic])
        assert (done.journals, done.written) == (3, len(events))
        assert done.removed > 0
        assert await self.read(book, tag, topic) == events
        assert (await book.tags.rebuild(tag, topics=[topic])).removed == 0
        assert await self.read(book, tag, topic) == events
        assert await self.read(book, f"{tag}-2", topic) == others
        await journal.append("j-0", [Event("later", tags={tag})])
        await journal.delete("j-2", to=8)
        await self.settle(book, topic)
        after = [event.payload for event in await self.read(book, tag, topic)]
        assert after == [event.payload for event in events if event.id != "j-2"] + ["later"]

    async def damage_rows(self, book: Book, rows: list[TagRow]) -> None:
        """Remove every second row, number others wrongly, and add rows that were never appended."""
        replace = msgspec.structs.replace
        for number, row in enumerate(rows):
            key = Key(row.topic, row.id)
            pointer, head = await book.store.pointer(row.topic, row.partition), await book.store.head(key)
            assert pointer is not None
            assert head is not None
            wrong = [replace(row, tag_seq_nr=row.tag_seq_nr + 7)] if number % 2 else []
            wrong.append(replace(row, index=row.index + 5))
            wrong.append(replace(row, time_ms=row.time_ms - 1, seq_nr=1, incarnation_offset=row.incarnation_offset + 1))
            repair = Repair(
                key=key, partition=row.partition, pointer=pointer, rev=0, head=head,
                extra_tags=() if number % 2 else (row.place,), tags=tuple(wrong),
            )  # fmt: skip
            await book.store.repair(repair)

    async def test_a_tag_can_be_rebuilt_during_replication(self, book: Book, topic: str, tag: str) -> None:
        journal = book.journal(topic)
        for n in range(40):
            await journal.append(f"j-{n % 4}", [Event(n, tags={tag})])
        await self.settle(book, topic)

        async def keep_replicating() -> None:
            for n in range(40, 60):
                await journal.append(f"j-{n % 4}", [Event(n, tags={tag})])
                if n % 5 == 0:
                    await journal.delete(f"j-{n % 4}", to=n // 8)
                if n == 50:
                    await journal.purge("j-3")
                await replicate(book.log, book.store, topic)

        async def rebuild() -> None:
            for _ in range(3):
                await book.tags.rebuild(tag, topics=[topic])

        await asyncio.gather(keep_replicating(), rebuild())
        await self.settle(book, topic)
        events = await self.read(book, tag, topic)
        for id in (f"j-{n}" for n in range(4)):
            expected = [(event.seq_nr, event.payload) async for event in journal.read(id)]
            assert [(event.seq_nr, event.payload) for event in events if event.id == id] == expected
            numbers = [event.tag_seq_nr for event in events if event.id == id]
            assert numbers == [seq_nr for seq_nr, _ in expected], "every event has the tag, so both numbers are equal"

    async def test_a_rebuild_keeps_deleted_events_if_the_settings_keep_them(
        self, book: Book, topic: str, tag: str
    ) -> None:
        await self.keep_deleted(book, topic, tag)
        keeping = Tags(store=book.store, clock=book.clock, settings=TagSettings(deletes="keep"))
        assert (await keeping.rebuild(tag, topics=[topic])).removed == 0
        assert len(await self.read(book, tag, topic)) == 6
        assert (await book.tags.rebuild(tag, topics=[topic])).removed == 5
        assert [event.payload for event in await self.read(book, tag, topic)] == [2]

    async def test_tags_are_listed(self, book: Book, topic: str, tag: str) -> None:
        await book.journal(topic).append("a", [Event(1, tags={tag, f"{tag}-2"})])
        await self.settle(book, topic)
        assert {tag, f"{tag}-2"} <= {each async for each in book.tags.list()}

    async def test_an_invalid_offset_is_refused(self, book: Book, tag: str) -> None:
        for bad in ("", "nonsense", "AAAA"):
            with pytest.raises(InvalidInput):
                book.tags.read(tag, after=bad)
        with pytest.raises(InvalidInput):
            book.tags.read(tag, after=datetime(2026, 1, 1))
        with pytest.raises(InvalidInput):
            book.tags.read("")
