"""Make a projection of a book: its stream, its target database and the types of its events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal

from sqlalchemy import create_engine

from tidebook.core.errors import InvalidInput
from tidebook.domain.event_source import EventSource, TagSource, TopicSource
from tidebook.domain.event_type import EventTypes
from tidebook.domain.log_topic_source import LogTopicSource
from tidebook.domain.process import ProcessManager, Publish, QueueOf
from tidebook.domain.projection import RETRIES, SLICES, Projection
from tidebook.domain.sql_engine import SqlEngine
from tidebook.domain.topic_types import TopicTypes
from tidebook.log.port import Log
from tidebook.runtime.clock import Clock, Ids
from tidebook.store.port import StoreWriter
from tidebook.tags.event import check_tag, check_topics
from tidebook.tags.horizon import Horizons
from tidebook.wiring.settings import Settings

#: How long SQLite waits for another writer.
BUSY_S: Final = 30.0


def make_source(
    log: Log, store: StoreWriter, *, topics: Iterable[str] | None, tags: Iterable[str] | None
) -> EventSource:
    """Return the stream of tags or of whole topics."""
    names = check_topics(topics)
    if tags is not None:
        if isinstance(tags, str | bytes):
            raise InvalidInput(f"tags is a list of names, not a text: write tags=[{tags!r}]")
        wanted = list(dict.fromkeys(tags))
        for tag in wanted:
            check_tag(tag)
        if wanted:
            return TagSource(store, Horizons(store), wanted, names)
    if not names:
        raise InvalidInput("a projection follows topics=[...] or tags=[...]")
    if store.orders_topics:
        return TopicSource(store, Horizons(store), names)
    return LogTopicSource(log, store, Horizons(store), names)


def make_process(
    name: str,
    log: Log,
    store: StoreWriter,
    clock: Clock,
    ids: Ids,
    declared: TopicTypes,
    settings: Settings,
    *,
    into: Any,
    topics: Iterable[str] | None,
    tags: Iterable[str] | None,
    events: Iterable[type[Any]] | None,
    retries: int | None,
    on_failure: Literal["stop", "park"],
    queue_of: QueueOf,
    publish: Publish,
) -> ProcessManager:
    """Return a process manager; the arguments are those of `Book.process`."""
    types = None if events is None else EventTypes(events)
    return ProcessManager(
        name,
        source=make_source(log, store, topics=topics, tags=tags),
        engine=SqlEngine(_process_engine(settings) if into is None else into),
        log=log,
        store=store,
        clock=clock,
        ids=ids,
        types_of=declared.of if types is None else lambda _: types,
        retries=RETRIES if retries is None else retries,
        on_failure=on_failure,
        queue_of=queue_of,
        publish=publish,
    )


def _process_engine(settings: Settings) -> Any:
    """Return an engine for the offsets of processes in the folder of an embedded book."""
    if not settings.section("store").embedded:
        raise InvalidInput("a process needs a database for its offsets: book.process(..., into=engine)")
    settings.folder.mkdir(parents=True, exist_ok=True)
    return create_engine(f"sqlite:///{settings.folder / 'process.db'}", connect_args={"timeout": BUSY_S})


def make_projection(
    name: str,
    log: Log,
    store: StoreWriter,
    clock: Clock,
    ids: Ids,
    declared: TopicTypes,
    *,
    into: Any,
    topics: Iterable[str] | None,
    tags: Iterable[str] | None,
    events: Iterable[type[Any]] | None,
    tables: Iterable[Any],
    slices: int | None,
    retries: int | None,
    on_failure: Literal["stop", "park"],
) -> Projection:
    """Return a projection; the arguments are those of `Book.projection`."""
    types = None if events is None else EventTypes(events)
    return Projection(
        name,
        source=make_source(log, store, topics=topics, tags=tags),
        engine=SqlEngine(into),
        log=log,
        store=store,
        clock=clock,
        ids=ids,
        types_of=declared.of if types is None else lambda _: types,
        tables=tables,
        slices=SLICES if slices is None else slices,
        retries=RETRIES if retries is None else retries,
        on_failure=on_failure,
    )
