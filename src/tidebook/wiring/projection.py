"""The arguments of a book's projections and processes: their stream, their types, and the default database."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal

from sqlalchemy import create_engine

from tidebook.core.errors import InvalidInput
from tidebook.domain.event_source import EventSource, TagSource, TopicSource
from tidebook.domain.event_type import EventTypes
from tidebook.domain.log_topic_source import LogTopicSource
from tidebook.domain.projection import RETRIES
from tidebook.domain.topic_types import TopicTypes
from tidebook.log.port import Log
from tidebook.store.port import StoreWriter
from tidebook.tags.event import check_tag, check_topics
from tidebook.tags.horizon import Horizons
from tidebook.wiring.settings import PROCESS_FILE, Settings

#: How long SQLite waits for another writer.
BUSY_S: Final = 30.0


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
        raise InvalidInput("a projection or a process needs topics=[...] or tags=[...]")
    if store.orders_topics:
        return TopicSource(store, Horizons(store), names)
    return LogTopicSource(log, store, Horizons(store), names)


def projection_arguments(
    log: Log,
    store: StoreWriter,
    declared: TopicTypes,
    *,
    topics: Iterable[str] | None,
    tags: Iterable[str] | None,
    events: Iterable[type[Any]] | None,
    retries: int | None,
    on_failure: Literal["stop", "park"],
) -> dict[str, Any]:
    """Return the arguments that the classes `Projection` and `ProcessManager` have in common."""
    types = None if events is None else EventTypes(events)
    return {
        "source": make_source(log, store, topics=topics, tags=tags),
        "log": log,
        "store": store,
        "types_of": declared.of if types is None else lambda _: types,
        "retries": RETRIES if retries is None else retries,
        "on_failure": on_failure,
    }


def process_engine(settings: Settings) -> Any:
    """Return an engine for the file in an embedded book's folder that has the offsets of process managers."""
    if not settings.section("store").embedded:
        raise InvalidInput("a process needs a database for its offsets: book.process(..., into=engine)")
    settings.folder.mkdir(parents=True, exist_ok=True)
    return create_engine(f"sqlite:///{settings.folder / PROCESS_FILE}", connect_args={"timeout": BUSY_S})
