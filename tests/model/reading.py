"""Run the real reader step by step: the explorer answers each of its requests to log or store.

The reader's code is deterministic, so its next step follows from the answers so far. These form a tree, whose
nodes are computed once per world, by running the reader again from the start.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

from tests.model.world import CONFIG, KEYS, Seen, World
from tidebook.core.errors import TidebookError, Truncated
from tidebook.core.event import Event, encode_event
from tidebook.core.head import Head
from tidebook.core.key import Key
from tidebook.core.position import Position
from tidebook.core.replication_plan import EventRow, Pointer, listed_between
from tidebook.core.seq_nr import LAST
from tidebook.journal.head_cache import HeadCache
from tidebook.journal.prefetch import PrefetchedRange, RowPrefetcher
from tidebook.journal.reader import Reader
from tidebook.journal.settings import BarrierKind, JournalSettings
from tidebook.journal.view import ReadView, ViewBase, is_replicated, read_events, stored_base
from tidebook.log.port import RecordPage
from tidebook.runtime.metrics import Metrics

KEY = KEYS[0]
T = TypeVar("T")


class Question(NamedTuple):
    """A request of the reader, with the start, the end and the length of its page.

    A page may need the list of segments first; that list is then a part of the request for rows.
    """

    what: str
    after: int = 0
    to: int = 0
    limit: int = 0
    incarnation: Position | None = None
    run_start: int = 0
    listed: tuple[int, ...] = ()


class Ask:
    """When the reader awaits it, it passes the request to the driver of the reader."""

    def __init__(self, question: Question) -> None:
        self._question = question

    def __await__(self) -> Generator[Question, Any, Any]:
        answer = yield self._question
        return answer


class AskedLog:
    """A log whose end is a request, and whose records are known."""

    indexed_by_key = True
    end_is_linearizable = True

    def __init__(self, world: World) -> None:
        self._world = world

    async def end(self, topic: str, partition: int) -> int:
        return int(await Ask(Question("end")))

    async def read(self, topic: str, partition: int, *, start: int, stop: int, key: bytes, **_: Any) -> RecordPage:
        return RecordPage(tuple(record for record in self._world.records[start:stop] if record.key == key), stop)


class AskedStore:
    """A store of which every read is a request."""

    async def pointer(self, topic: str, partition: int) -> Pointer | None:
        offset = await Ask(Question("pointer"))
        return None if offset < 0 else Pointer(Position(CONFIG.epoch, offset), 0)

    async def head(self, key: Key) -> Head | None:
        head: Head | None = await Ask(Question("head"))
        return head

    async def events(self, key: Key, head: Head | None, *, after: int, to: int, limit: int) -> Sequence[EventRow]:
        if head is None:  # a broken reader requests rows without a head
            return list(await Ask(Question("events", after, to, limit)))
        question = Question("events", after, to, limit, head.incarnation, head.run_start)
        if listed_between(head, after, to):
            question = question._replace(listed=await Ask(question._replace(what="segments")))
        rows: Sequence[EventRow] = await Ask(question)
        return rows


class BarrierLast(Reader):
    """A reader whose mark is slow: pointer and head are read before the barrier is fixed."""

    async def view(self, key: Key, kind: BarrierKind, *, again: bool = False) -> ReadView:
        stored = await self.cache.stored(key)
        return await self._view(key, await self.barriers.fix(kind), None, stored)


class Answered:
    """Rows that the explorer has already returned."""

    def __init__(self, rows: Sequence[EventRow]) -> None:
        self._rows = rows

    def __await__(self) -> Generator[Any, Any, Sequence[EventRow]]:
        yield from ()
        return self._rows


class HeadKnown(Reader):
    """A reader that has read this journal before: it requests the first rows with the earlier head.

    The earlier head is read at any time before this read; the mark is slow.
    """

    #: The requests with their answers so far, and the index of the first one of a read that has used no row yet.
    asked: list[tuple[str, Any]]
    since: int | None = None

    async def begin(self, key: Key, kind: BarrierKind, rows: RowPrefetcher, *, after: int, to: int) -> ReadView:
        self.since = len(self.asked)
        known = await self._earlier(key)
        if known is None or not known.live or max(after, known.delete_to) >= min(to, known.seq_nr):
            return await self.view(key, kind)
        rows.begin(known, after=max(after, known.delete_to), to=min(to, known.seq_nr))
        return await self._with_rows(key, kind, known, rows)

    async def view(self, key: Key, kind: BarrierKind, *, again: bool = False) -> ReadView:
        self.since = None  # earlier answers are not used
        return await super().view(key, kind, again=again)

    async def _earlier(self, key: Key) -> Head | None:
        return await self._store.head(key)

    async def _hold(self, key: Key, known: Head, rows: RowPrefetcher) -> None:
        """Read a range of rows now, and give it to the prefetcher, which returns it later."""
        after, to = rows.next_range()
        if after == to:
            return
        found = await self._store.events(key, known, after=after, to=to, limit=to - after)
        rows.add(PrefetchedRange(after, to, to - after, Answered(found)))

    async def _with_rows(self, key: Key, kind: BarrierKind, known: Head, rows: RowPrefetcher) -> ReadView:
        await self._hold(key, known, rows)
        pointer, head = await self._store.pointer(key.topic, 0), await self._store.head(key)
        stored = stored_base(pointer, head, key.topic, 0, CONFIG)
        return await self._view(key, await self.barriers.fix(kind), pointer, stored)


class MarkFirst(HeadKnown):
    """A `HeadKnown` with a fast mark, whose pointer is read before the rows."""

    async def _with_rows(self, key: Key, kind: BarrierKind, known: Head, rows: RowPrefetcher) -> ReadView:
        barrier = await self.barriers.fix(kind)
        pointer = await self._store.pointer(key.topic, 0)
        await self._hold(key, known, rows)
        stored = stored_base(pointer, await self._store.head(key), key.topic, 0, CONFIG)
        return await self._view(key, barrier, pointer, stored)


class SplitRanges(HeadKnown):
    """A `HeadKnown` that reads its first range before everything else, and the second one after it."""

    async def _with_rows(self, key: Key, kind: BarrierKind, known: Head, rows: RowPrefetcher) -> ReadView:
        await self._hold(key, known, rows)
        barrier = await self.barriers.fix(kind)
        pointer = await self._store.pointer(key.topic, 0)
        stored = stored_base(pointer, await self._store.head(key), key.topic, 0, CONFIG)
        await self._hold(key, known, rows)
        return await self._view(key, barrier, pointer, stored)


class PointerKnown(HeadKnown):
    """A `HeadKnown` that also has the pointer of an earlier read, which may be older than the head."""

    pointer: Pointer | None

    async def _earlier(self, key: Key) -> Head | None:
        self.pointer = await self._store.pointer(key.topic, 0)
        return await self._store.head(key)

    async def _with_rows(self, key: Key, kind: BarrierKind, known: Head, rows: RowPrefetcher) -> ReadView:
        barrier = await self.barriers.fix(kind)
        await self._hold(key, known, rows)
        stored = stored_base(self.pointer, await self._store.head(key), key.topic, 0, CONFIG)
        return await self._view(key, barrier, self.pointer, stored)


class HeadFolded(HeadKnown):
    """A `HeadKnown` with the head of its own fold of the log, which reads only a pointer and rows from the store."""

    async def _with_rows(self, key: Key, kind: BarrierKind, known: Head, rows: RowPrefetcher) -> ReadView:
        await self._hold(key, known, rows)
        pointer = await self._store.pointer(key.topic, 0)
        barrier = await self.barriers.fix(kind)
        folded = ReadView(ViewBase(None, -1), CONFIG)
        await self.cache.fold_tail(key, folded, barrier)
        self.cache.next_offset = barrier + 1
        self.cache.heads.keep(key.id, folded.head)
        if not is_replicated(folded.head, pointer):
            return await self.view(key, kind)
        return await self._view(key, barrier, pointer, None)


class Node(NamedTuple):
    """The reader after some answers: what it has yielded, and its next question, or how it ended."""

    number: int
    answers: tuple[int | tuple[int, ...], ...]
    yielded: Seen
    question: Question | None
    #: "whole", "truncated", or an unexpected error; empty while the read continues.
    end: str
    #: The first barrier of the read, and the greatest.
    first_barrier: int
    last_barrier: int
    #: The greatest offset in any answer so far: the log has at least that length.
    seen_offset: int


class Reading:
    """One read of a world's first journal."""

    def __init__(
        self, world: World, *, start: int = 1, to: int = LAST, page_events: int = 1, reader: type[Reader] = Reader
    ) -> None:
        self.world = world
        self.start, self.to = start, to
        self._settings, self._metrics = JournalSettings(page_events=page_events), Metrics()
        self._reader = reader
        self._begins_with = "pointer" if reader is BarrierLast else "end"
        self._next: dict[tuple[int, int | tuple[int, ...]], Node] = {}
        self._alike: dict[tuple[Any, ...], Node] = {}
        self._count = 0
        self.first = self._run(())

    def answered(self, node: Node, answer: int | tuple[int, ...]) -> Node:
        """Return the reader after one more answer: an offset, a head's number, or the rows of a page."""
        found = self._next.get((node.number, answer))
        if found is None:
            found = self._next[node.number, answer] = self._run((*node.answers, answer))
        return found

    def _run(self, answers: tuple[int | tuple[int, ...], ...]) -> Node:
        log, store = AskedLog(self.world), AskedStore()
        cache = HeadCache(log, store, KEY.topic, 0, CONFIG, self._settings, self._metrics)  # type: ignore[arg-type]
        reader = self._reader(log, store, cache, self._settings, self._metrics)  # type: ignore[arg-type]
        events = reader.decoded_events(KEY, read_events, start=self.start, to=self.to, kind="mark")
        left, barriers_given, yielded, offsets = list(answers), [], [], []
        asked: list[tuple[str, Any]] = []
        if isinstance(reader, HeadKnown):
            reader.asked = asked
        memory: tuple[Any, ...] = ()
        question, end = None, ""
        while not end and question is None:
            step: Coroutine[Any, Any, Any] = events.__anext__()  # type: ignore[assignment]
            answer: Any = None
            while True:
                try:
                    question = step.send(answer)
                except StopIteration as yielding:
                    event = yielding.value
                    kept = encode_event(Event(event.payload))
                    row = EventRow(event.seq_nr, kept, event.timestamp_ms, Position(CONFIG.epoch, event.offset), 0)
                    yielded.append((event.seq_nr, self._row(row)))
                    break
                except StopAsyncIteration:
                    end = "whole"
                    break
                except Truncated:
                    end = "truncated"
                    break
                except TidebookError as error:
                    end = repr(error)
                    break
                if question is None:  # the reader only yielded to other tasks
                    answer = None
                    continue
                if not left:
                    memory = self._memory(events, question, asked)
                    step.close()
                    break
                asked.append((question.what, left[0]))
                answer = self._answer(question, left.pop(0))
                match question.what:
                    case "end":
                        barriers_given.append(answer - 1)
                    case "pointer":
                        offsets.append(answer)
                    case "head":
                        offsets.append(-1 if answer is None else answer.position.offset)
                    case "segments":
                        pass
                    case _:
                        offsets += [row.position.offset for row in answer]
                question = None
        self._count += 1
        node = Node(
            self._count,
            answers,
            tuple(yielded),
            question,
            end,
            barriers_given[0] if barriers_given else self.world.size,
            max(barriers_given, default=-1),
            max(offsets, default=-1),
        )
        # Readers with the same memory behave the same from here on, even if their earlier answers differ.
        return self._alike.setdefault((*node[2:], memory), node)

    def _memory(self, reading: Any, question: Question, asked: list[tuple[str, Any]]) -> tuple[Any, ...]:
        """Return the answers so far that the suspended reader may still use."""
        kept = reading.ag_frame.f_locals
        carried = (kept["after"], kept["again"], kept["incarnation"], kept["to"])
        reader = kept["self"]
        if isinstance(reader, HeadKnown) and reader.since is not None:
            # While a plan made with an earlier head is executed, all answers may matter.
            return (*carried, *asked[reader.since :])
        began = max((i for i, (what, _) in enumerate(asked) if what == self._begins_with), default=0)
        if all(what != "events" for what, _ in asked[began:]) and question.what != "events":
            return (*carried, *(answer for _, answer in asked[began:]))  # while a view is built
        view = kept["view"]
        appends = tuple((each.first, each.offset) for each in view.appends)
        heads = tuple(-1 if head is None else self.world.interned.head(head) for head in (view.stored, view.head))
        page = asked[-1][1] if question.what == "head" else ()
        return (*carried, *heads, appends, view.as_of, repr(kept["plan"]), page)

    def _row(self, row: EventRow) -> int:
        """Return the index of this row in the world, by number, record and bytes; -1 for an unknown event."""
        for index in range(3):
            number = self.world.interned.known_row(
                EventRow(row.seq_nr, row.encoded, row.timestamp_ms, row.position, index)
            )
            if number is not None:
                return number
        return -1

    def _answer(self, question: Question, answer: int | tuple[int, ...]) -> Any:
        interned = self.world.interned
        match question.what:
            case "end":
                assert isinstance(answer, int)
                return answer + 1
            case "pointer":
                return answer
            case "head":
                assert isinstance(answer, int)
                return None if answer < 0 else interned.heads[answer]
            case "segments":
                return answer
            case _:
                assert isinstance(answer, tuple)
                return [interned.rows[row] for row in answer]
