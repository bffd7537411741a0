"""Make a projection of a book: its stream, its target database and the types of its events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal, NamedTuple, TypedDict, Unpack

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
from tidebook.wiring.settings import PROCESS_FILE, Settings

#: How long SQLite waits for another writer.
BUSY_S: Final = 30.0


class ProjectionContext(NamedTuple):
    """The parts of a book that its projections and processes share."""

    log: Log
    store: StoreWriter
    clock: Clock
    ids: Ids
    declared: TopicTypes


class ProjectionOptions(TypedDict):
    """The source of a projection or a process, and the treatment of events that fail; see `Book.projection`."""

    topics: Iterable[str] | None
    tags: Iterable[str] | None
    events: Iterable[type[Any]] | None
    retries: int | None
    on_failure: Literal["stop", "park"]


def make_source(
    log: Log, store: StoreWriter, *, topics: Iterable[str] | None, tags: Iterable[str] | None
) -> EventSource:
    """Return the stream of tags or of whole topics."""
    names = check_topics(topics)
    if tags is not None:
        if isinstance(tags, str | bytes):
            raise InvalidInput(f"tags must be a list of names, not a string: write tags=[{tags!r}]")
        wanted = list(dict.fromkeys(tags))
        for tag in wanted:
            check_tag(tag)
        if wanted:
            return TagSource(store, Horizons(store), wanted, names)
    if not names:
        raise InvalidInput("a projection needs topics=[...] or tags=[...]")
    if store.orders_topics:
        return TopicSource(store, Horizons(store), names)
    return LogTopicSource(log, store, Horizons(store), names)


def _arguments(context: ProjectionContext, options: ProjectionOptions) -> dict[str, Any]:
    types = None if options["events"] is None else EventTypes(options["events"])
    return {
        "source": make_source(context.log, context.store, topics=options["topics"], tags=options["tags"]),
        "log": context.log,
        "store": context.store,
        "clock": context.clock,
        "ids": context.ids,
        "types_of": context.declared.of if types is None else lambda _: types,
        "retries": RETRIES if options["retries"] is None else options["retries"],
        "on_failure": options["on_failure"],
    }


def make_process(
    name: str,
    context: ProjectionContext,
    settings: Settings,
    *,
    into: Any,
    queue_of: QueueOf,
    publish: Publish,
    **options: Unpack[ProjectionOptions],
) -> ProcessManager:
    """Return a process manager; the arguments are those of `Book.process`."""
    engine = SqlEngine(_process_engine(settings) if into is None else into)
    return ProcessManager(name, engine=engine, queue_of=queue_of, publish=publish, **_arguments(context, options))


def _process_engine(settings: Settings) -> Any:
    """Return an engine for the offsets of processes in the folder of an embedded book."""
    if not settings.section("store").embedded:
        raise InvalidInput("a process needs a database for its offsets: book.process(..., into=engine)")
    settings.folder.mkdir(parents=True, exist_ok=True)
    return create_engine(f"sqlite:///{settings.folder / PROCESS_FILE}", connect_args={"timeout": BUSY_S})


def make_projection(
    name: str,
    context: ProjectionContext,
    *,
    into: Any,
    tables: Iterable[Any],
    slices: int | None,
    **options: Unpack[ProjectionOptions],
) -> Projection:
    """Return a projection; the arguments are those of `Book.projection`."""
    arguments = _arguments(context, options)
    slices = SLICES if slices is None else slices
    return Projection(name, engine=SqlEngine(into), tables=tables, slices=slices, **arguments)
