"""The targets of imported messages: the outbox or a queue of a book, with marks that move in the same transaction."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from tidebook.core.errors import Fenced, InvalidInput
from tidebook.importing.deimos_tables import DeimosMessage
from tidebook.outbox.outbox import Outbox
from tidebook.queue.port import Step
from tidebook.queue.queue import Queue
from tidebook.wiring.adapters import extra

MARK_TABLE = "tidebook_import"


class ImportMark(msgspec.Struct, frozen=True):
    """How far a topic was copied: the id of its last message, and how many messages."""

    last_id: int = 0
    messages: int = 0


class MessageTarget(Protocol):
    """Takes the messages of a source."""

    async def mark(self, source: str, topic: str) -> ImportMark:
        """Return how far a topic was copied."""

    async def take(self, source: str, topic: str, before: ImportMark, messages: Sequence[DeimosMessage]) -> ImportMark:
        """Add messages and move the mark, both or neither; raise Fenced if another import has moved it."""

    async def close(self) -> None:
        """Release the resources that the target has opened."""


class OutboxTarget:
    """The outbox of a book. The marks are in the table `tidebook_import`, next to the outbox's tables."""

    def __init__(self, outbox: Outbox) -> None:
        self._sql: Any = extra("sqlalchemy", "outbox")
        self._outbox = outbox
        self._engine: Any = None
        metadata = self._sql.MetaData()
        column = self._sql.Column
        self._marks = self._sql.Table(
            MARK_TABLE,
            metadata,
            column("source", self._sql.String(200), primary_key=True),
            column("topic", self._sql.String(255), primary_key=True),
            column("last_id", self._sql.BigInteger, nullable=False),
            column("messages", self._sql.BigInteger, nullable=False),
        )

    async def mark(self, source: str, topic: str) -> ImportMark:
        """Return how far a topic was copied; the first call creates the missing tables."""
        return await asyncio.to_thread(self._mark, source, topic)

    async def take(self, source: str, topic: str, before: ImportMark, messages: Sequence[DeimosMessage]) -> ImportMark:
        return await asyncio.to_thread(self._take, source, topic, before, messages)

    async def close(self) -> None:
        if self._engine is not None:
            await asyncio.to_thread(self._engine.dispose)

    def _connect(self) -> Any:
        if self._engine is None:
            engine = self._sql.create_engine(self._outbox.url)
            try:
                self._prepare(engine)
            except BaseException:
                engine.dispose()
                raise
            self._engine = engine
        return self._engine

    def _prepare(self, engine: Any) -> None:
        """Create the missing tables, unless Deimos has tables of the same names."""
        found = self._sql.inspect(engine)
        if found.has_table("kafka_messages"):
            columns = {each["name"] for each in found.get_columns("kafka_messages")}
            if "payload" not in columns:
                raise InvalidInput(
                    "the book's [sql] database has tables of Deimos under the names of Tidebook's outbox: give "
                    "Tidebook a schema, as in postgresql://host/database?options=-csearch_path%3Dtidebook"
                )
        self._outbox.ready()
        self._marks.create(engine, checkfirst=True)

    def _is_mark(self, source: str, topic: str) -> Any:
        return (self._marks.c.source == source) & (self._marks.c.topic == topic)

    def _mark(self, source: str, topic: str) -> ImportMark:
        columns = self._sql.select(self._marks.c.last_id, self._marks.c.messages)
        with self._connect().connect() as connection:
            row = connection.execute(columns.where(self._is_mark(source, topic))).first()
        return ImportMark() if row is None else ImportMark(*row)

    def _take(self, source: str, topic: str, before: ImportMark, messages: Sequence[DeimosMessage]) -> ImportMark:
        after = ImportMark(messages[-1].id, before.messages + len(messages))
        values = {"last_id": after.last_id, "messages": after.messages}
        with self._connect().begin() as connection:
            if before == ImportMark():
                try:
                    connection.execute(self._sql.insert(self._marks).values(source=source, topic=topic, **values))
                except self._sql.exc.IntegrityError as error:
                    raise _moved(topic) from error
            else:
                unchanged = self._is_mark(source, topic) & (self._marks.c.last_id == before.last_id)
                if connection.execute(self._sql.update(self._marks).where(unchanged).values(**values)).rowcount != 1:
                    raise _moved(topic)
            self._outbox.backend("db").publish(connection, [each.message for each in messages], ordered=False)
        return after


class QueueTarget:
    """A queue of a book. Each message is an entry without a key: `topic`, `key`, `payload` and `partition_key`."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    async def mark(self, source: str, topic: str) -> ImportMark:
        """Return how far a topic was copied."""
        text = (await self._queue.marks(f"{source}:{topic}")).get(0)
        return ImportMark() if text is None else ImportMark(*map(int, text.split("/")))

    async def take(self, source: str, topic: str, before: ImportMark, messages: Sequence[DeimosMessage]) -> ImportMark:
        after = ImportMark(messages[-1].id, before.messages + len(messages))
        step = Step(0, None if before == ImportMark() else _place(before), _place(after))
        put = await self._queue.put_once([_entry(each) for each in messages], source=f"{source}:{topic}", steps=[step])
        if put is None:
            raise _moved(topic)
        return after

    async def close(self) -> None:
        """Do nothing: the book closes its queues."""


def _place(mark: ImportMark) -> str:
    return f"{mark.last_id}/{mark.messages}"


def _moved(topic: str) -> Fenced:
    return Fenced(f"topic {topic}: another import copies the same messages: let it finish, then import again")


def _entry(waiting: DeimosMessage) -> dict[str, Any]:
    given = waiting.message
    return {
        "topic": given.topic,
        "key": _text(given.key),
        "payload": _text(given.payload),
        "partition_key": _text(given.partition_key),
    }


def _text(data: bytes | None) -> Any:
    """Return bytes as a JSON value: text if they are UTF-8, otherwise `{"base64": …}`."""
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}
