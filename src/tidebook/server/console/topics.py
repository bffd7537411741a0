"""The topics with journals, and the ids of one topic."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Final, Literal

import msgspec

from tidebook.api.routes import BY_NAME
from tidebook.core.action import Mark
from tidebook.core.errors import NotFound
from tidebook.core.key import topic_name
from tidebook.core.record import read_record
from tidebook.log.port import read_all
from tidebook.server.console.act import ActResult, Preview, api_act
from tidebook.server.console.page import Page
from tidebook.server.console.pagination import PageNumber, paginate
from tidebook.server.console.survey import TopicSurvey
from tidebook.server.console.view import View
from tidebook.wiring.book import Book
from tidebook.wiring.topics import TopicDescription

ROWS_MAX: Final = 50
IDS_MAX: Final = 100
#: The maximum number of ids that are searched for a prefix.
SCAN_MAX: Final = 10_000
#: The maximum number of records of a partition that are read to find out whether a topic has changed.
MARKS_MAX: Final = 10_000

Sort = Literal["name", "records", "lag", "rate"]


class TopicsQuery(msgspec.Struct, frozen=True):
    """Which topics, in which order."""

    prefix: str = ""
    sort: Sort = "name"
    page: PageNumber = 1


class TopicsData(msgspec.Struct, frozen=True, kw_only=True):
    topics: list[TopicSurvey]
    #: How many there are.
    total: int
    page: int
    pages: int
    #: The time of the survey from which the order and the rates are taken.
    as_of_ms: int


async def topics(view: View) -> TopicsData:
    """List topics; their numbers are read now, the order by numbers is that of the last survey."""
    query, surveyor = view.fields, view.context.surveyor
    survey = await surveyor.read()
    known = {each.topic: each for each in survey.topics}
    names = [
        name
        for name in await view.book.topics()
        if view.may_see_topic(name) and query.prefix.casefold() in name.casefold()
    ]
    if query.sort != "name":
        names.sort(key=lambda name: -(getattr(known.get(name), query.sort, 0) or 0))
    shown, page, pages = paginate(names, query.page, rows_max=ROWS_MAX)
    rows = []
    for row in await asyncio.gather(*map(surveyor.topic, shown)):
        last = known.get(row.topic)
        rows.append(row if last is None else msgspec.structs.replace(row, rate=last.rate, lag_s=last.lag_s))
    return TopicsData(topics=rows, total=len(names), page=page, pages=pages, as_of_ms=survey.at_ms)


class TopicQuery(msgspec.Struct, frozen=True):
    """One topic, and the beginning of the ids to list."""

    topic: str
    prefix: str = ""


class TopicData(msgspec.Struct, frozen=True, kw_only=True):
    """A topic with some of its journals."""

    topic: TopicDescription
    limit_bytes: int | None
    ids: list[str]
    #: Whether there may be more ids, and how many were examined.
    more: bool
    scanned: int


async def topic(view: View) -> TopicData:
    """Show a topic and the first ids with a prefix; a bounded number of ids is examined."""
    name, prefix = topic_name(view.fields.topic), view.fields.prefix
    described = await view.book.describe_topic(name)
    config = await view.book.store.topic_config(name)
    if config is None:
        raise NotFound(f"topic {name} holds no journals")
    ids, scanned, more = list[str](), 0, False
    if prefix and await view.book.journal(name).head(prefix, barrier="offset") is not None:
        ids.append(prefix)
    async with aclosing(view.book.store.ids(name)) as found:  # type: ignore[type-var]
        async for id in found:
            scanned += 1
            if id.startswith(prefix) and id not in ids[:1]:
                ids.append(id)
            if len(ids) > IDS_MAX or scanned >= SCAN_MAX:
                more = True
                break
    shown = sorted(ids[:IDS_MAX])
    return TopicData(topic=described, limit_bytes=config.limit_bytes, ids=shown, more=more, scanned=scanned)


class TopicForm(msgspec.Struct, frozen=True):
    """One topic, and the ends of its partitions that a dry run counted up to."""

    topic: str
    ends: str = ""


async def preview_delete(view: View) -> Preview:
    """Count what deleting a topic would remove; marks written since an earlier dry run are not counted."""
    found = await view.book.describe_topic(topic_name(view.fields.topic))
    counted = view.fields.ends.split(",")
    ends = found.ends
    if len(counted) == len(ends) and all(each.isdecimal() for each in counted):
        bounds = [*zip(map(int, counted), found.ends, strict=True)]
        if all([await _only_marks(view.book, found.topic, number, *each) for number, each in enumerate(bounds)]):
            ends = tuple(map(int, counted))
    count = sum(ends) - sum(found.starts)
    text = f"This deletes topic {found.topic} with all its journals: {count:,} records of the log."
    fields = {"ends": ",".join(map(str, ends))}
    return Preview(text=text, count=count, word=found.topic, members=[found.epoch, *found.starts, *ends], fields=fields)


async def _only_marks(book: Book, topic: str, partition: int, start: int, stop: int) -> bool:
    """Return whether a range of the log contains nothing but marks; False if it is too long to look."""
    if not 0 <= stop - start <= MARKS_MAX:
        return False
    records = await read_all(book.log, topic, partition, start=start, stop=stop)
    return all(isinstance(read_record(each.value, limit_bytes=len(each.value or b"")), Mark) for each in records)


async def delete(view: View) -> ActResult:
    await view.book.delete_topic(view.fields.topic)
    return ActResult(message=f"Topic {view.fields.topic} is deleted.", to="/journals")


PAGES = (
    Page("journals", BY_NAME["topics.list"], topics, TopicsQuery),
    Page("topic", BY_NAME["journals.ids"], topic, TopicQuery),
)
ACTS = (api_act("topics.delete", "Delete topic", delete, TopicForm, preview_delete),)
