"""The import of kafka-journal's journals: plan the appends of one journal, write them, and compare the result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from datetime import date
from enum import StrEnum
from hashlib import blake2b
from typing import Any

import msgspec

from tidebook.core.bounds import IDENTITY_BYTES
from tidebook.core.errors import Conflict, Corrupt, OutcomeUnknown, TidebookError, Unavailable
from tidebook.core.event import Event
from tidebook.core.head import Head
from tidebook.core.key import Key, journal_id, topic_name
from tidebook.importing.kafka_journal_tables import KafkaJournalTables
from tidebook.importing.source_journal import SourceEvent, SourceHead, belongs_to, read_event, read_head
from tidebook.journal.journal import Journal
from tidebook.runtime.backoff import Backoff
from tidebook.wiring.book import Book

#: Bounds of one append. Several appends of the source are joined: each is still atomic, and fewer records are written.
APPEND_EVENTS_MAX = 200
APPEND_BYTES_MAX = 256 * 1024
#: How many journals are copied concurrently.
JOURNALS_AT_ONCE = 32
ATTEMPTS_MAX = 6
RETRY_FIRST_S = 0.2
RETRY_MAX_S = 5.0


class ImportState(StrEnum):
    """The result of an import for one journal."""

    #: Events were copied, or would be in a dry run.
    IMPORTED = "imported"
    #: The book already has the whole journal.
    COMPLETE = "complete"
    #: kafka-journal would purge it: it is not copied.
    EXPIRED = "expired"
    #: It cannot be copied; `reason` says why.
    REFUSED = "refused"


class JournalResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one journal."""

    topic: str
    id: str
    state: ImportState
    #: The events that the source has, and how many of them were appended now.
    events: int = 0
    appended: int = 0
    reason: str | None = None


class ImportSummary(msgspec.Struct, kw_only=True):
    """The totals of an import."""

    journals: int = 0
    imported: int = 0
    complete: int = 0
    expired: int = 0
    refused: int = 0
    events: int = 0
    appended: int = 0

    def add(self, result: JournalResult) -> None:
        """Count one journal."""
        self.journals += 1
        setattr(self, result.state.value, getattr(self, result.state.value) + 1)
        self.events += result.events
        self.appended += result.appended


class PlannedAppend(msgspec.Struct, frozen=True):
    """Events with consecutive numbers that are appended together; the id is the same in every run."""

    append_id: bytes
    first: int
    events: list[Event]

    @property
    def last(self) -> int:
        """Return the number of the last event."""
        return self.first + len(self.events) - 1


class AppendPlanner:
    """Joins events into appends: as many as fit, without gaps in the numbers, and never a part of a Kafka record."""

    def __init__(self, key: Key) -> None:
        self._key = key
        self._events: list[SourceEvent] = []
        self._bytes = 0

    def add(self, event: SourceEvent, size_bytes: int) -> Iterator[PlannedAppend]:
        """Add the next event; yield the append that is complete because the event does not join it."""
        if self._events:
            last = self._events[-1]
            same_record = (last.partition, last.offset) == (event.partition, event.offset)
            full = len(self._events) >= APPEND_EVENTS_MAX or self._bytes + size_bytes > APPEND_BYTES_MAX
            if event.seq_nr != last.seq_nr + 1 or (full and not same_record):
                yield from self.finish()
        self._events.append(event)
        self._bytes += size_bytes

    def finish(self) -> Iterator[PlannedAppend]:
        """Yield the last append, if there is one."""
        if self._events:
            first = self._events[0]
            yield PlannedAppend(append_id(self._key, first), first.seq_nr, [each.event for each in self._events])
        self._events, self._bytes = [], 0


def append_id(key: Key, first: SourceEvent) -> bytes:
    """Return the id of the append that begins with an event; a second import derives the same id."""
    text = "\0".join((key.topic, key.id, str(first.partition), str(first.offset), str(first.seq_nr)))
    return blake2b(text.encode(), digest_size=IDENTITY_BYTES, person=b"tidebook-import").digest()


class JournalContents:
    """Counts events and digests their numbers, payloads and tags, to compare a journal with its source."""

    def __init__(self) -> None:
        self.count = 0
        self._digest = blake2b(digest_size=16)

    def add(self, seq_nr: int, payload: Any, tags: Collection[str]) -> int:
        """Add one event and return its size in bytes."""
        kind = type(payload).__name__ if isinstance(payload, str | bytes) else "json"
        encoded = msgspec.msgpack.encode((seq_nr, kind, payload, sorted(tags)))
        self.count += 1
        self._digest.update(len(encoded).to_bytes(8, "big") + encoded)
        return len(encoded)

    def equals(self, other: JournalContents) -> bool:
        """Return whether both have the same events in the same order."""
        return self.count == other.count and self._digest.digest() == other._digest.digest()


class JournalImport:
    """Copies journals of kafka-journal into a book, a bounded number at a time."""

    def __init__(
        self,
        tables: KafkaJournalTables,
        book: Book,
        *,
        today: date,
        topics: Sequence[str] | None = None,
        dry_run: bool = False,
        verify: bool = True,
        at_once: int = JOURNALS_AT_ONCE,
    ) -> None:
        self._tables = tables
        self._book = book
        self._today = today
        self._topics = None if topics is None else {topic_name(each) for each in topics}
        self._dry_run = dry_run
        self._verify = verify
        self._at_once = at_once

    async def run(self, on_result: Callable[[JournalResult], object]) -> ImportSummary:
        """Copy every journal, report each, and return the totals; a refused journal does not stop the others."""
        summary = ImportSummary()
        running: set[asyncio.Task[JournalResult]] = set()

        def collect(done: set[asyncio.Task[JournalResult]]) -> None:
            for task in done:
                result = task.result()
                summary.add(result)
                on_result(result)

        try:
            async for row in self._tables.heads():
                if self._topics is not None and row["topic"] not in self._topics:
                    continue
                if len(running) >= self._at_once:
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    collect(done)
                running.add(asyncio.create_task(self._import_row(row)))
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                collect(done)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return summary

    async def _import_row(self, row: Any) -> JournalResult:
        try:
            head = read_head(row)
            topic_name(head.topic)
            journal_id(head.id)
            if head.has_expired(self._today):
                return JournalResult(topic=head.topic, id=head.id, state=ImportState.EXPIRED)
            return await self._import_journal(head)
        except (Unavailable, OutcomeUnknown):
            raise  # the whole book or the whole cluster failed: the next run continues from here
        except TidebookError as error:
            return JournalResult(topic=row["topic"], id=row["id"], state=ImportState.REFUSED, reason=str(error))

    async def _import_journal(self, head: SourceHead) -> JournalResult:
        key = Key(head.topic, head.id)
        journal = self._book.journal(head.topic)
        target = await journal.head(head.id)
        if not self._verify and target is not None and target.seq_nr >= head.seq_nr:
            return JournalResult(topic=head.topic, id=head.id, state=ImportState.COMPLETE)
        writer = JournalWriter(journal, head, target, dry_run=self._dry_run)
        contents = JournalContents()
        planner = AppendPlanner(key)
        await writer.begin()
        async for event in self._source_events(head):
            size_bytes = contents.add(event.seq_nr, event.event.payload, event.event.tags)
            for append in planner.add(event, size_bytes):
                await writer.write(append)
        for append in planner.finish():
            await writer.write(append)
        await writer.end()
        if self._verify and not self._dry_run:
            await self._compare(journal, head, contents)
        state = ImportState.IMPORTED if writer.changed else ImportState.COMPLETE
        return JournalResult(topic=head.topic, id=head.id, state=state, events=contents.count, appended=writer.appended)

    async def _source_events(self, head: SourceHead) -> AsyncIterator[SourceEvent]:
        """Yield the events of a journal; raise Corrupt if their numbers do not agree with the head."""
        last = head.delete_to
        async for row in self._tables.events(head):
            if not belongs_to(row, head):
                continue
            event = read_event(row)
            if event.seq_nr == last:
                raise Corrupt(
                    f"number {last} was written twice: kafka-journal accepted two writers; delete the wrong row"
                )
            if event.seq_nr > head.seq_nr:
                raise Corrupt(
                    f"the head is at {head.seq_nr} and there is an event {event.seq_nr}: "
                    "let kafka-journal's replicator finish, then import again"
                )
            last = event.seq_nr
            yield event
        if last != head.seq_nr:
            raise Corrupt(f"the head is at {head.seq_nr} and the last event is {last}")

    async def _compare(self, journal: Journal, head: SourceHead, expected: JournalContents) -> None:
        found = JournalContents()
        start = head.delete_to + 1
        if start <= head.seq_nr:
            async for event in journal.read(head.id, start=start, end=head.seq_nr):
                found.add(event.seq_nr, event.payload, event.tags)
        if not found.equals(expected):
            raise Corrupt(
                f"the book's journal has {found.count} events up to {head.seq_nr} and the source has {expected.count}, "
                "or their contents differ: the book had a journal of this id that was not imported, or has deleted "
                "events since; import into another book, or purge that journal and import again"
            )


class JournalWriter:
    """Writes the events that a journal of the book lacks; in a dry run it only counts them."""

    def __init__(self, journal: Journal, head: SourceHead, target: Head | None, *, dry_run: bool) -> None:
        self._journal = journal
        self._source = head
        self._reached = 0 if target is None else target.seq_nr
        self._deleted_to = 0 if target is None else target.delete_to
        self._dry_run = dry_run
        self.appended = 0
        self.changed = False

    async def begin(self) -> None:
        """Create a journal whose numbers begin after the deleted ones, if there is none yet."""
        if self._source.delete_to and not self._reached:
            await self._delete()
            self._reached = self._source.delete_to

    async def write(self, append: PlannedAppend) -> None:
        """Append the events that the book's journal does not have yet."""
        if append.last <= self._reached:
            return
        skipped = max(0, self._reached + 1 - append.first)
        events = append.events[skipped:]
        self.changed = True
        self.appended += len(events)
        if not self._dry_run:
            # Only a whole append has the id of its source: a part of one is another append.
            await self._append(append.first + skipped, events, None if skipped else append.append_id)
        self._reached = append.last

    async def end(self) -> None:
        """Delete up to the number of the source, if the book's journal existed before."""
        if self._source.delete_to > self._deleted_to:
            await self._delete()

    async def _delete(self) -> None:
        self.changed = True
        self._deleted_to = self._source.delete_to
        if not self._dry_run:
            await self._journal.delete(self._source.id, to=self._source.delete_to)

    async def _append(self, first: int, events: list[Event], id: bytes | None) -> None:
        """Append, and retry while the log is unavailable; after an unknown outcome, the same append is repeated."""
        backoff = Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S)
        identity: dict[str, Any] = {"append_id": id}
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                await self._journal.append(
                    self._source.id, events, at=first, expire_after=self._source.expire_after, **identity
                )
                return
            except OutcomeUnknown as error:
                if attempt == ATTEMPTS_MAX:
                    raise
                identity = {"retry": error}
            except Unavailable:
                if attempt == ATTEMPTS_MAX:
                    raise
            except Conflict as error:
                raise Corrupt(
                    f"another process has written to the book's journal, which is now at {error.found}"
                ) from error
            await asyncio.sleep(backoff.next_s())
